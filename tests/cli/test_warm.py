"""Other weights under running engines, as an operator does it: warm, rollback, with processes."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from tests.cli.node import SMALL, Node, no_loader, other, parts, wait_for
from tests.cli.snapshot import check, environment
from tests.processes import PATIENCE_S, end
from wcache.checkpoint import identify, open_checkpoint
from wcache.config import load_config
from wcache.protocol.control import Control
from wcache.protocol.messages import Attach, Attached, Stage, Staged, Switch, Switched
from wcache.protocol.wire import close_all
from wcache.ranks import ask
from wcache.rollout.warm_plan import WarmPlan

pytestmark = [pytest.mark.cli, pytest.mark.process]

ENGINE = Path(__file__).parent.parent / "systemd" / "engine.py"


class Engine:
    """A process that has attached, and reads its weights when it is asked to."""

    def __init__(self, node: Node, rank: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ENGINE)],
            env=environment(node.places, {"WCACHE_RANK": str(rank)}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.pid = json.loads(self.process.stdout.readline())["pid"]

    @property
    def digest(self) -> str:
        """Of every tensor, read anew."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: str = json.loads(self.process.stdout.readline())["digest"]
        return found


@contextlib.contextmanager
def engine(node: Node, rank: int = 0) -> Iterator[Engine]:
    running = Engine(node, rank)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(PATIENCE_S)
        for pipe in (running.process.stdin, running.process.stdout):
            assert pipe is not None
            pipe.close()


class Lease:
    """What this process has attached: as an engine does it, without the cost of one."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    @property
    def digest(self) -> str:
        """Of every byte, read anew."""
        found = hashlib.sha256()
        for fd in self._fds[1:]:
            found.update(os.pread(fd, os.fstat(fd).st_size, 0))
        return found.hexdigest()


@contextlib.contextmanager
def lease(node: Node, rank: int = 0) -> Iterator[Lease]:
    with Control.connect(node.paths.rank(rank), "client") as control:
        attached = control.request(Attach(), Attached)
        fds = control.channel.take_fds(1 + len(attached.slabs))
        try:
            yield Lease(fds)
        finally:
            close_all(fds)


def digest(node: Node, rank: int = 0) -> str:
    """What an engine that starts now reads."""
    count = len(node.report(rank).leases)
    with lease(node, rank) as held:
        found = held.digest
    wait_for(lambda: count == len(node.report(rank).leases), "the lease ends")
    return found


def loads(node: Node, rank: int) -> bool:
    """The rank's loader is at work on other weights, or done."""
    found = node.report(rank)
    return found.progress is not None or found.staged is not None


def slabs_of(pid: int) -> int:
    """Slabs that a process has open."""
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sum("memfd:wcache-slab" in str(link) for link in links)


def kill_and_wait(node: Node, rank: int = 0, leases: int = 0) -> None:
    """Kills a daemon; waits for the one that comes after it, and for ``leases`` to be renewed."""
    before = node.report(rank)
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        found = ask(node.paths.rank(rank))
        return found is not None and found.pid != before.pid and len(found.leases) >= leases

    wait_for(is_back, "a new daemon")


def test_weights_are_switched_under_a_live_engine(node: Node) -> None:
    assert node.up().code == 0
    with engine(node) as old:
        before = old.digest
        done = node("warm", "--model", other(node))
        assert done.code == 0, done.stderr
        assert "1 engine keeps the old weights" in done.stderr
        assert "generation 1 drains, 1 lease" in done.stderr
        with engine(node) as new:
            assert new.digest != before
        assert old.digest == before
        assert parts(node) == {1: "draining", 2: "serving"}
        assert slabs_of(node.report().pid) == 2
    wait_for(lambda: parts(node) == {2: "serving"}, "the old weights are freed")
    assert slabs_of(node.report().pid) == 1
    status = node.status()["ranks"][0]
    assert status["stored_fds"] == status["expected_fds"] == 3
    assert node("verify").code == 0


def test_warm_has_nothing_to_do_when_the_weights_are_the_wanted_ones(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    written = node.paths.config_file.stat().st_mtime_ns
    done = node("warm")
    check(done, "job_warm_nothing", node.root)
    assert node.report().generations == before.generations
    assert node.paths.config_file.stat().st_mtime_ns == written


@pytest.mark.parametrize("command", ["up", "warm"])
def test_a_checkpoint_that_was_changed_in_place_is_told(node: Node, command: str) -> None:
    assert node.up().code == 0
    assert "could not be loaded again" not in node(command).stderr
    folder = Path(load_config(node.paths.config_file).model.path)
    weights = load_file(folder / "model.safetensors")
    save_file({name: one + 1 for name, one in weights.items()}, folder / "model.safetensors")
    done = node(command)
    assert done.code == 0
    assert "lost weights could not be loaded again" in done.stderr
    assert f"wcache up --model {folder}" in done.stderr


def test_warm_takes_what_was_written_into_the_file(node: Node) -> None:
    assert node.up().code == 0
    before = digest(node)
    text = node.paths.config_file.read_text().splitlines()
    path = f'path = "{other(node)}"'
    lines = [path if line.startswith("path =") else line for line in text]
    node.paths.config_file.write_text("\n".join(lines))
    stale = node("warm")
    assert stale.code == 5
    assert "is not the checkpoint that the configuration was written for" in stale.stderr
    without = [line for line in lines if not line.startswith("content =")]
    node.paths.config_file.write_text("\n".join(without))
    assert node("warm").code == 0
    assert digest(node) != before
    assert (load_config(node.paths.config_file).model.content or "").startswith("sha256:")
    assert load_config(node.paths.previous_file).model.path == str(node.model)


def test_warm_says_what_it_would_do_and_does_what_it_said(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    model = other(node)
    dry = node("warm", "--model", model, "--dry-run", "--json")
    plan = msgspec.json.decode(dry.stdout, type=WarmPlan)
    assert (dry.code, plan.problem) == (0, "")
    assert [one.action for one in plan.ranks] == ["load", "load"]
    assert all(one.needed_bytes <= plan.free_bytes["cpu"] for one in plan.ranks)
    assert parts(node) == {1: "serving"}
    check(node("warm", "--model", model, "--keep-old", "--quiet"), "job_warm", node.root)
    again = msgspec.json.decode(node("warm", "--dry-run", "--json").stdout, type=WarmPlan)
    assert [one.action for one in again.ranks] == ["keep", "keep"]
    check(node("status"), "job_warm_status", node.root)
    check(node("rollback"), "job_rollback", node.root)
    check(node("rollback"), "job_rollback_again", node.root)


def test_when_one_rank_can_not_load_none_is_switched(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    before, config = digest(node), node.paths.config_file.read_bytes()
    with no_loader(node, 1):
        done = node("warm", "--model", other(node))
    assert done.code == 1
    assert "error: rank 1: the loader failed" in done.stderr
    assert "nothing was switched" in done.stderr
    assert [digest(node, rank) for rank in (0, 1)] == [before, before]
    assert [parts(node, rank) for rank in (0, 1)] == [{1: "serving"}, {1: "serving"}]
    assert node.paths.config_file.read_bytes() == config
    assert node("status").code == 0
    # A crash of either does not bring the other weights up after all.
    kill_and_wait(node, 0)
    assert digest(node) == before
    assert node("warm", "--model", other(node)).code == 0
    assert digest(node) == digest(node, 1) != before


def test_a_checkpoint_that_fails_to_load_leaves_the_old_one_served(node: Node) -> None:
    assert node.up().code == 0
    before = digest(node)
    with no_loader(node, 0):
        done = node("warm", "--model", other(node))
    assert done.code == 1
    assert digest(node) == before
    assert node.report().staging is None


def test_rollback_brings_the_weights_and_the_configuration_back(node: Node) -> None:
    assert node.up().code == 0
    before, config = digest(node), load_config(node.paths.config_file)
    assert node("warm", "--model", other(node), "--keep-old").code == 0
    newer = load_config(node.paths.config_file)
    assert digest(node) != before
    with lease(node) as running:
        after = running.digest
        assert node("rollback").code == 0
        assert digest(node) == before
        assert running.digest == after
        assert parts(node) == {1: "serving", 2: "draining"}
        assert load_config(node.paths.config_file) == config
        # What is loaded already is not read again: its files are not even there.
        (node.root / "other-1" / "model.safetensors").rename(node.root / "hidden")
        assert node("warm", "--previous").code == 0
        assert load_config(node.paths.config_file) == newer
        assert digest(node) == after
    wait_for(lambda: parts(node) == {2: "serving"}, "the old weights are freed")


def test_rollback_needs_no_hold_while_an_engine_uses_the_old_weights(node: Node) -> None:
    assert node.up().code == 0
    with lease(node) as running:
        assert node("warm", "--model", other(node)).code == 0
        assert node("rollback").code == 0
        assert digest(node) == running.digest


def test_rollback_goes_to_what_was_served_before_and_not_to_what_was_loaded_before(
    node: Node,
) -> None:
    assert node.up().code == 0
    first = digest(node)
    with lease(node):
        assert node("warm", "--model", other(node)).code == 0
        with lease(node):
            # It was bad, is in use all the same, and has the number below that of the next one.
            assert node("rollback").code == 0
            assert node("warm", "--model", other(node, 2)).code == 0
            assert parts(node) == {1: "draining", 2: "draining", 3: "serving"}
            assert node("rollback").code == 0
            assert digest(node) == first


def test_rollback_goes_to_what_is_held_for_it_also_when_that_was_loaded_later(node: Node) -> None:
    assert node.up().code == 0
    first = str(load_config(node.paths.config_file).model.path)
    assert node("warm", "--model", other(node), "--keep-old").code == 0
    second = digest(node)
    assert node("warm", "--model", first, "--keep-old").code == 0
    assert parts(node) == {1: "serving", 2: "held"}
    done = node("rollback")
    assert done.code == 0, done.stderr
    assert digest(node) == second


def test_rollback_over_another_layout_names_the_up_that_helps(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    assert node("up", "--model", other(node), *SMALL, "--dp", "1").code == 0
    done = node("rollback")
    assert done.code == 1
    assert "there is nothing to go back to" in done.stderr
    assert re.search(r"wcache up --model \S+ --dp 2 loads them from disk", done.stderr)
    assert node("up", "--model", other(node, 2), *SMALL, "--dp", "2").code == 0
    done = node("rollback")
    assert done.code == 1
    assert "there is nothing to go back to" in done.stderr
    assert re.search(r"wcache up --model \S+ loads them from disk", done.stderr)


def test_rollback_is_refused_when_the_old_weights_are_gone(node: Node) -> None:
    assert node.up().code == 0
    before = digest(node)
    assert node("warm", "--model", other(node)).code == 0
    check(node("rollback"), "job_rollback_gone", node.root)
    assert node("warm", "--previous").code == 0
    assert digest(node) == before


def test_rollback_is_all_ranks_or_none(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    with lease(node, 1):
        assert node("warm", "--model", other(node)).code == 0
        wait_for(lambda: parts(node, 0) == {2: "serving"}, "rank 0 has freed the old weights")
        done = node("rollback")
        assert done.code == 1
        assert "rank 0 does not hold the weights of before any more" in done.stderr
        assert parts(node, 1) == {1: "draining", 2: "serving"}


def test_what_is_held_can_be_dropped(node: Node) -> None:
    assert node.up().code == 0
    assert node("warm", "--model", other(node), "--keep-old").code == 0
    done = node("rollback", "--drop")
    assert done.code == 0
    assert "given up" in done.stderr
    assert parts(node) == {2: "serving"}
    assert "nothing is held" in node("rollback", "--drop").stderr


def test_a_killed_daemon_comes_back_with_the_same_weights_in_every_phase(node: Node) -> None:
    assert node.up().code == 0
    first = digest(node)
    assert node("warm", "--model", other(node), "--keep-old").code == 0
    second = digest(node)
    kill_and_wait(node)
    assert digest(node) == second
    assert parts(node) == {1: "held", 2: "serving"}
    assert node("rollback").code == 0
    assert digest(node) == first
    with engine(node):  # renews its lease after each crash
        assert node("warm", "--previous").code == 0
        kill_and_wait(node, leases=1)
        assert digest(node) == second
        assert node("rollback").code == 0
        kill_and_wait(node, leases=1)
        assert digest(node) == first
        restarted = node("restart")
        assert restarted.code == 0, restarted.stderr
        wait_for(lambda: len(node.report(0).leases) == 1, "the engine renews its lease")
        assert digest(node) == first


def test_a_daemon_that_is_killed_during_the_load_loads_again(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    before = digest(node)
    process = subprocess.Popen(
        [sys.executable, "-m", "wcache", "warm", "--model", other(node)],
        env=environment(node.places), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: node.report().staging is not None, "the order is given")
        kill_and_wait(node)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0, said
    finally:
        end(process)  # type: ignore[arg-type]  # of text, and ended all the same
        assert process.stderr is not None
        process.stderr.close()
    assert digest(node) == digest(node, 1) != before


def test_a_killed_warm_is_gone_on_with(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    before, config = digest(node), node.paths.config_file.read_bytes()
    model = other(node)
    process = subprocess.Popen(
        [sys.executable, "-m", "wcache", "warm", "--quiet", "--model", model],
        env=environment(node.places), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # Killed any earlier, it would not have had loaders started for its orders.
    wait_for(lambda: all(loads(node, rank) for rank in (0, 1)), "both ranks load")
    end(process)
    wait_for(lambda: parts(node, 0).get(2) == parts(node, 1).get(2) == "staged", "all is loaded")
    assert digest(node) == before
    assert node.paths.config_file.read_bytes() == config
    told = node("status")
    assert (
        "generation 2 is loaded and not served: wcache warm with the same options goes on"
        in told.stderr
    )
    given_up = node("warm")
    assert "loaded and never served are given up" in given_up.stderr
    assert parts(node) == {1: "serving"}
    late = node("warm", "--model", model, "--timeout", "0.1")
    assert late.code == 3
    assert "wcache warm with the same options goes on with it" in late.stderr
    wait_for(lambda: parts(node, 0).get(3) == parts(node, 1).get(3) == "staged", "all is loaded")
    # As if it had been killed between the two ranks.
    with Control.connect(node.paths.rank(0), "operator") as control:
        control.request(Switch(generation=3), Switched)
    assert node("warm", "--model", model).code == 0
    assert digest(node) == digest(node, 1) != before


def test_replace_frees_what_is_served_first_and_says_so(node: Node) -> None:
    assert node.up().code == 0
    before, model = digest(node), other(node)
    with lease(node):
        refused = node("warm", "--model", model, "--replace", "--yes")
        assert refused.code == 1
        assert f"pid {os.getpid()}" in refused.stderr
    check(node("warm", "--model", model, "--replace"), "job_warm_replace_unasked", node.root)
    assert digest(node) == before
    done = node("warm", "--model", model, "--replace", "--yes")
    assert done.code == 0, done.stderr
    assert "rank 0 loses generation 1" in done.stderr
    assert digest(node) != before
    assert node("status").code == 0


def test_a_load_that_fails_after_replace_says_how_to_get_back(node: Node) -> None:
    assert node.up().code == 0
    before = digest(node)
    with no_loader(node, 0):
        done = node("warm", "--model", other(node), "--replace", "--yes")
    assert done.code == 1
    assert "wcache warm --previous" in done.stderr
    status = node("status")
    assert status.code == 3
    assert " empty " in status.stdout
    assert node("warm", "--previous").code == 0
    assert digest(node) == before


def test_what_does_not_fit_is_refused_with_numbers(node: Node) -> None:
    """A checkpoint of 4 TiB, of which the disk holds nothing."""
    assert node.up().code == 0
    model = Path(other(node))
    nbytes = 4 << 40
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}})
    with (model / "model.safetensors").open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header.encode())
        try:
            out.truncate(8 + len(header) + nbytes)
        except OSError:
            pytest.skip("this file system has no files of 4 TiB")
    for arguments in (["--dry-run"], []):
        done = node("warm", "--model", str(model), *arguments)
        assert done.code == 1
        assert "to load beside what is served: rank 0 needs 4096.0 GiB, " in done.stderr
        assert "2.0 MiB is held by the old weights" in done.stderr
        assert "with --replace, which frees the old weights first, it would not fit" in done.stderr
    cache = node("warm", "--model", str(model), "--page-cache")
    assert cache.code == 1
    assert "the page cache can not hold 4096.0 GiB" in cache.stderr
    assert parts(node) == {1: "serving"}


def test_ranks_that_are_not_up_are_not_warmed(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    assert node("down", "1").code == 0
    done = node("warm", "--model", other(node))
    assert done.code == 1
    assert "rank 1: not up, wcache up starts it" in done.stderr
    assert parts(node) == {1: "serving"}


def test_one_rank_is_not_given_other_weights_than_the_rest(node: Node) -> None:
    assert node.up("--dp", "2").code == 0
    done = node("warm", "0", "--model", other(node))
    assert done.code == 1
    assert "rank 1 would go on with other weights than rank 0" in done.stderr


def test_page_cache_reads_and_changes_nothing(node: Node) -> None:
    assert node.up().code == 0
    before = node.report()
    done = node("warm", "--page-cache", "--model", other(node))
    assert done.code == 0, done.stderr
    assert "page cache: " in done.stderr
    assert " of 1 file in " in done.stderr
    assert node.report().generations == before.generations
    assert load_config(node.paths.config_file).model.path == str(node.model)
    for options in (["--dry-run"], []):
        told = json.loads(node("warm", "--page-cache", "--json", *options).stdout)
        assert (told["files"], told["seconds"] is None) == (1, bool(options))
    assert node("warm", "3", "--page-cache").code == 4


def test_what_rollback_leaves_is_told_as_json_too(node: Node) -> None:
    assert node.up().code == 0
    assert node("warm", "--model", other(node), "--keep-old").code == 0
    for options in ([], ["--drop"]):
        done = node("rollback", "--json", *options)
        assert done.code == 0, done.stderr
        (held,) = json.loads(done.stdout)["generations"]
        assert (held["number"], held["role"]) == (1, "serving")


def test_up_with_other_weights_names_warm_while_engines_use_the_old(node: Node) -> None:
    assert node.up().code == 0
    model = other(node)
    with node.lease():
        refused = node("up", "--model", model, *SMALL)
    assert refused.code == 1
    assert "wcache warm" in refused.stderr
    assert node("up", "--model", model, *SMALL).code == 0
    assert parts(node) == {2: "serving"}
    assert load_config(node.paths.previous_file).model.path == str(node.model)


def test_an_order_that_no_loader_was_started_for_is_told_and_gone_on_with(node: Node) -> None:
    """As after a warm that was killed right after its orders."""
    assert node.up().code == 0
    before, model = digest(node), other(node)
    wanted = load_config(node.paths.config_file)
    section = msgspec.structs.replace(wanted.model, path=model, content=_content(model))
    with Control.connect(node.paths.rank(0), "operator") as control:
        control.request(Stage(config=msgspec.structs.replace(wanted, model=section)), Staged)
    told = node("status")
    assert "other weights are wanted beside these, and no loader is at work" in told.stderr
    assert node("warm", "--model", model).code == 0
    assert digest(node) != before


def _content(model: str) -> str:
    return identify(open_checkpoint(Path(model))).digest
