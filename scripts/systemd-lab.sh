#!/usr/bin/env bash
# A real systemd as PID 1 of namespaces of its own, so that units can be tested on any machine.
#
#   systemd-lab.sh run  [-b SRC:DST]... -- COMMAND [ARGUMENT]...   up, exec, down
#   systemd-lab.sh up   [-o PID] [-b SRC:DST]...                   boots, and leaves it running
#   systemd-lab.sh exec -- COMMAND [ARGUMENT]...                   runs COMMAND inside
#   systemd-lab.sh pid                                             its init, as seen from here
#   systemd-lab.sh console                                         what PID 1 wrote before its journal
#   systemd-lab.sh down [--clean]                                  ends it; --clean stops units first
#   systemd-lab.sh lay DEBS FOLDER                                 unpacks a systemd for those without
#
# WCACHE_LAB is its folder (default /run/wcache-lab); labs in different folders run side by side.
# WCACHE_LAB_SYSTEMD is a folder with a systemd (usr/lib/systemd and what it needs) for a machine that
# has none, as lay makes it of Debian packages: the lab sees its files beneath the machine's own, of
# which it hides none.
# It ends by itself when the process of -o has ended, and after WCACHE_LAB_LIFETIME_S in any case.
# Inside, the files of this machine are seen and none can be changed, but /tmp, /run and /dev/shm are
# empty. -b binds what is needed there, or is to be written to: SRC is the machine's own.
#
# Needs root with CAP_SYS_ADMIN, util-linux >= 2.36, overlayfs, and the cgroup2 hierarchy.
set -euo pipefail

LAB=${WCACHE_LAB:-/run/wcache-lab}
LIFETIME_S=${WCACHE_LAB_LIFETIME_S:-3600}
LAID=${WCACHE_LAB_SYSTEMD:+$(realpath "$WCACHE_LAB_SYSTEMD")}
readonly LAB LIFETIME_S LAID BOOT_S=60 CLEAN_S=60
SELF=$(realpath "$0")
readonly SELF
readonly INSIDE=(env -i HOME=/root LANG=C.UTF-8 TERM=dumb SYSTEMD_PAGER= SYSTEMD_COLORS=0
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)

# Units of the distribution that would reach for the host's kernel, or wait for what is not there.
readonly MASKED=(
  systemd-sysctl systemd-modules-load systemd-binfmt systemd-random-seed systemd-pstore
  systemd-remount-fs systemd-firstboot systemd-machine-id-commit kmod-static-nodes
  systemd-update-utmp systemd-update-utmp-runlevel systemd-tmpfiles-setup-dev
  systemd-journal-flush systemd-logind systemd-networkd-wait-online
  systemd-journald-audit.socket proc-sys-fs-binfmt_misc.automount getty.target timers.target
  sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount
  sys-fs-fuse-connections.mount dev-hugepages.mount dev-mqueue.mount
)

fail() { echo "systemd-lab: $*" >&2; exit 1; }

# --- on the way in ---------------------------------------------------------------------------------

# In a mount namespace of its own. Without a cgroup of its own as root of the hierarchy, systemd
# would take the host's, and move every process of the host into a scope.
outer() {
  local cgroup
  cgroup=$LAB/cgroups/$(<"$LAB/name")
  mkdir -p "$LAB/cgroups"
  mount -t cgroup2 cgroup2 "$LAB/cgroups"
  mkdir -p "$cgroup/inside" "$cgroup/outside"
  echo $$ >"$cgroup/inside/cgroup.procs"
  exec unshare --fork --kill-child=SIGKILL --pid --cgroup --ipc --uts --net "$SELF" .inner "$@"
}

# PID 1 of the new namespaces: makes the root, and becomes systemd.
inner() {
  local pid root=$LAB/root
  read -r pid _ </proc/self/stat  # /proc is still the host's, so this is the number known there
  hostname wcache-lab 2>/dev/null || true
  ip link set lo up 2>/dev/null || true
  make_root "$root"
  bind_all "$root" "$@"
  echo "$pid" >"$LAB/pid"
  cd "$root"
  mkdir .old
  pivot_root . .old
  umount -l .old
  rmdir .old
  mount --make-rshared /
  # "container" keeps systemd from the clock, the kernel's log and the consoles.
  exec "${INSIDE[@]}" container=wcache-lab "$(systemd_path || fail "no systemd is installed")" --system --unit=multi-user.target \
    --log-target="${WCACHE_LAB_LOG:-journal}" --show-status=0
}

# systemd_path [ROOT]
systemd_path() {
  local path
  for path in /usr/lib/systemd/systemd /lib/systemd/systemd; do
    if [[ -x ${1-}$path ]]; then echo "$path"; return; fi
  done
  return 1
}

# An overlay, never a bind of /: at boot systemd empties /tmp, writes /etc and starts services.
make_root() {
  local root=$1 layers=$LAB/layers lower=/ unit
  mkdir -p "$root" "$layers"
  mount -t tmpfs -o mode=755,size=2g tmpfs "$layers"
  mkdir "$layers/upper" "$layers/work"
  if [[ -n $LAID ]]; then
    # A copy: the kernel takes no layer that lies within another one.
    cp -a "$LAID" "$layers/laid"
    lower=/:$layers/laid
  fi
  mount -t overlay -o "lowerdir=$lower,upperdir=$layers/upper,workdir=$layers/work" overlay "$root"
  mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
  mount --bind "$root/proc/sys" "$root/proc/sys"
  mount -o remount,bind,ro "$root/proc/sys"
  mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
  mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
  make_dev "$root/dev"
  mount -t tmpfs -o mode=755,nosuid,nodev tmpfs "$root/run"
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
  # Without one it is a first boot, which enables whatever the distribution would have enabled.
  [[ -s $root/etc/machine-id ]] ||
    tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
  # What the host has enabled is not started here.
  rm -rf "$root/etc/systemd/system"
  mkdir -p "$root/etc/systemd/system" "$root/run/lock" "$root/run/systemd/system"
  for unit in "${MASKED[@]}"; do
    [[ $unit == *.* ]] || unit+=.service
    ln -s /dev/null "$root/run/systemd/system/$unit"
  done
  mkdir "$root/run/systemd/journald.conf.d"
  printf '%s\n' '[Journal]' Storage=volatile ReadKMsg=no ForwardToSyslog=no RateLimitBurst=0 \
    >"$root/run/systemd/journald.conf.d/lab.conf"
}

# No console: without one nobody waits for a terminal.
make_dev() {
  local dev=$1 node
  mount -t tmpfs -o mode=755,nosuid tmpfs "$dev"
  for node in null zero full random urandom tty \
    $(cd /dev && { compgen -G 'nvidia*'; compgen -G 'nvidia*/*'; } || true); do
    [[ -c /dev/$node ]] || continue
    mkdir -p "$(dirname "$dev/$node")"
    : >"$dev/$node"
    mount --bind "/dev/$node" "$dev/$node"
  done
  mkdir "$dev/pts" "$dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$dev/pts"
  mount -t tmpfs -o mode=1777 tmpfs "$dev/shm"
  ln -s pts/ptmx "$dev/ptmx"
  ln -s /proc/self/fd "$dev/fd"
  for node in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${node%:*}" "$dev/${node#*:}"; done
}

bind_all() {
  local root=$1 pair target
  shift
  for pair in "$@"; do
    target=$root${pair#*:}
    if [[ -d ${pair%%:*} ]]; then
      mkdir -p "$target"
    else
      mkdir -p "$(dirname "$target")"
      : >>"$target"
    fi
    mount --bind "${pair%%:*}" "$target"
  done
}

# --- from outside ----------------------------------------------------------------------------------

# True while the recorded pid is the init of another pid namespace: a number that was given to
# another process meanwhile is neither entered nor killed.
is_up() {
  local its
  [[ -s $LAB/pid ]] || return 1
  its=$(readlink "/proc/$(<"$LAB/pid")/ns/pid" 2>/dev/null) || return 1
  [[ -n $its && $its != "$(readlink /proc/self/ns/pid)" ]]
}

inside() {
  nsenter --target "$(<"$LAB/pid")" --mount --pid --cgroup --ipc --uts --net -- "${INSIDE[@]}" "$@"
}

# Runs a command of bash with the lab's cgroup as its folder.
in_cgroup() {
  # shellcheck disable=SC2016  # expanded by the inner shell
  unshare --mount --propagation private bash -c \
    'mount -t cgroup2 cgroup2 "$1/cgroups" && cd "$1/cgroups/$(<"$1/name")" && eval "$2"' - "$LAB" "$1"
}

# Says at once, and in words, what a boot would end with somewhere in the middle.
check_machine() {
  local tool kind
  ((EUID == 0)) || fail "needs root"
  for tool in unshare nsenter setsid mount umount pivot_root; do
    command -v "$tool" >/dev/null || fail "$tool is not installed (util-linux)"
  done
  for kind in overlay cgroup2; do
    grep -qw "$kind" /proc/filesystems || modprobe -q "$kind" 2>/dev/null ||
      fail "this kernel has no $kind"
  done
  systemd_path >/dev/null || { [[ -n $LAID ]] && systemd_path "$LAID" >/dev/null; } ||
    fail "no systemd is installed; WCACHE_LAB_SYSTEMD names a folder with one"
  unshare --mount --pid --cgroup --ipc --uts --net --fork true 2>/dev/null ||
    fail "namespaces can not be made here"
}

# Debian packages, or those of a system made like it, as one folder in which lib is usr/lib.
lay() {
  local debs=$1 folder=$2 deb part
  command -v dpkg-deb >/dev/null || fail "dpkg-deb is not installed"
  compgen -G "$debs/*.deb" >/dev/null || fail "there is no .deb in $debs"
  mkdir -p "$folder/usr"
  for deb in "$debs"/*.deb; do dpkg-deb --extract "$deb" "$folder"; done
  for part in bin sbin lib lib64; do
    [[ -d $folder/$part && ! -L $folder/$part ]] || continue
    mkdir -p "$folder/usr/$part"
    cp -a "$folder/$part/." "$folder/usr/$part/"
    rm -r "${folder:?}/$part"
  done
  rm -rf "$folder/usr/share/doc" "$folder/usr/share/man" "$folder/usr/share/locale"
  systemd_path "$folder" >/dev/null || fail "no systemd is among the packages in $debs"
}

up() {
  local binds=() owner='' moved='' state i
  while [[ ${1-} == -[bo] ]]; do
    if [[ $1 == -b ]]; then binds+=("$2"); else owner=$2; fi
    shift 2
  done
  (($# == 0)) || fail "up does not take $1"
  check_machine
  is_up && fail "$LAB is up already (pid $(<"$LAB/pid"))"
  [[ ! -e $LAB/name ]] || down
  mkdir -p "$LAB"
  echo "wcache-lab-$$" >"$LAB/name"
  setsid unshare --mount --propagation private "$SELF" .outer "${binds[@]}" \
    </dev/null >"$LAB/console" 2>&1 &
  echo $! >"$LAB/outer"
  setsid "$SELF" .guard "$owner" </dev/null >/dev/null 2>&1 &
  echo $! >"$LAB/guard"
  disown -a
  for ((i = 0; i < BOOT_S * 20; i++)); do
    if is_up; then
      if [[ -z $moved ]]; then
        # It had to be in the cgroup that became the root; inside, it would be a process without
        # a number there.
        in_cgroup "echo $(<"$LAB/outer") >outside/cgroup.procs"
        moved=yes
      fi
      if inside test -S /run/systemd/private 2>/dev/null; then
        state=$(inside timeout "$BOOT_S" systemctl is-system-running --wait 2>&1 || true)
        [[ $state == running || $state == degraded ]] && return
        down
        fail "the boot ended in the state $state"
      fi
    elif ! kill -0 "$(<"$LAB/outer")" 2>/dev/null; then
      cat "$LAB/console" >&2
      down
      fail "the boot failed"
    fi
    sleep 0.05
  done
  cat "$LAB/console" >&2
  down
  fail "no systemd within $BOOT_S s"
}

# Ends the lab when nobody else does.
guard() {
  if [[ -n ${1-} ]]; then
    timeout "$LIFETIME_S" tail --pid="$1" -f /dev/null || true
  else
    sleep "$LIFETIME_S"
  fi
  rm -f "$LAB/guard"  # down would end this process in the middle of it
  down
}

down() {
  local pid i
  [[ -e $LAB/name ]] || return 0
  if [[ -s $LAB/guard ]]; then
    pid=$(<"$LAB/guard")
    # A session of its own: sleep and tail go with it.
    if grep -qz -- .guard "/proc/$pid/cmdline" 2>/dev/null; then kill -- "-$pid" || true; fi
  fi
  if is_up; then
    pid=$(<"$LAB/pid")
    if [[ ${1-} == --clean ]]; then
      kill -s RTMIN+4 "$pid"  # what systemctl poweroff would ask of PID 1
      for ((i = 0; i < CLEAN_S * 10; i++)); do is_up || break; sleep 0.1; done
    fi
    # The end of a pid namespace's init is the end of everybody in it.
    if is_up; then kill -KILL "$pid"; fi
    for ((i = 0; i < 200; i++)); do is_up || break; sleep 0.05; done
  fi
  in_cgroup 'find "$PWD" -depth -type d -exec rmdir {} +' 2>/dev/null || true
  rm -rf --one-file-system "$LAB"
}

command=${1-}
shift || true
case $command in
  .outer) outer "$@" ;;
  .inner) inner "$@" ;;
  .guard) guard "$@" ;;
  up) up "$@" ;;
  down) down "$@" ;;
  lay) (($# == 2)) || fail "lay takes DEBS and FOLDER"; lay "$@" ;;
  pid) is_up || fail "no lab is up in $LAB"; cat "$LAB/pid" ;;
  console) cat "$LAB/console" ;;
  exec)
    [[ ${1-} != -- ]] || shift
    is_up || fail "no lab is up in $LAB"
    inside "$@"
    ;;
  run)
    arguments=()
    while [[ ${1-} == -b ]]; do arguments+=("$1" "$2"); shift 2; done
    [[ ${1-} != -- ]] || shift
    trap down EXIT
    up -o $$ "${arguments[@]}"
    inside "$@"
    ;;
  *) sed -n '3,11p' "$SELF"; exit 2 ;;
esac
