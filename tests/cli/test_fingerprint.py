"""``wcache fingerprint``: what weights are, and in which fields others are not the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.checkpoints import llama_config, llama_tensors, write_checkpoint, write_llama
from tests.cli.snapshot import Done, check, environment, wcache
from tests.places import Places
from wcache.commands.comparison import Comparison
from wcache.config import load_config
from wcache.fingerprint import Fingerprint, compare
from wcache.ranks import ask

pytestmark = pytest.mark.cli

CPU = ("--device", "cpu")


class Desk:
    """An operator in a folder with two models of the same layout, and a copy of one."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.root = places.root
        self.base = write_llama(places.root / "base")
        tensors = llama_tensors()
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        self.tuned = write_checkpoint(places.root / "tuned", tensors)
        self.copy = write_llama(places.root / "copy")

    def __call__(self, *arguments: str) -> Done:
        return wcache(self.places, "fingerprint", *arguments)

    def write(self, content: bytes | dict[str, Any], name: str = "fp.json") -> str:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (self.root / name).write_bytes(data)
        return name


@pytest.fixture
def desk(places: Places) -> Desk:
    return Desk(places)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("help", ["--help"]),
        ("no_model", []),
        ("model", ["base"]),
        ("json", ["base", "--tp", "3", "--rank", "2", "--dtype", "float16", "--json"]),
        ("same", ["base", "--diff", "copy"]),
        ("fine_tune", ["base", "--diff", "tuned"]),
        ("two_things", ["/nowhere", "--diff", "copy", "--running", "0"]),
        ("rank_for_a_model", ["base", "--diff", "3"]),
        ("model_for_a_rank", ["base", "--running", "copy"]),
        ("not_running", ["base", "--running", "draft:0"]),
        ("no_such_rank", ["base", "--tp", "3", "--rank", "3"]),
        ("absent", ["nowhere"]),
        ("not_cached", ["org/name", "--revision", "v1"]),
        ("layout", ["base", "--tp", "0"]),
        ("weights_file", ["base/model.safetensors"]),
    ],
)
def test_the_words_are_those_of_the_snapshot(desk: Desk, name: str, arguments: list[str]) -> None:
    options = () if name in ("help", "no_model", "weights_file") else CPU
    check(desk(*arguments, *options), f"fingerprint_{name}", desk.root)


def test_a_config_that_changed_is_named(desk: Desk) -> None:
    (desk.copy / "config.json").write_text(json.dumps(llama_config(rope_theta=7.0)))
    done = desk("base", "--diff", "copy", *CPU)
    assert done.code == 5
    assert "files that differ: config.json\n" in done.stderr
    assert "of the same layout" not in done.stderr


def test_a_copy_without_its_times_is_told_from_a_copy_with_them(desk: Desk) -> None:
    os.utime(desk.copy / "model.safetensors")
    done = desk("base", "--diff", "copy", *CPU)
    assert done.code == 5
    assert "copied without their times (cp -p keeps them)" in done.stderr


def test_json_is_what_a_rank_writes_and_reads_back(desk: Desk) -> None:
    desk.write(desk("base", "--json", *CPU).stdout.encode())
    assert desk("fp.json", "--diff", "base", *CPU).code == 0
    assert desk("base", "--diff", "fp.json", *CPU).code == 0
    assert desk("fp.json").stdout == desk("base", *CPU).stdout


def test_a_comparison_as_json_has_every_difference(desk: Desk) -> None:
    done = desk("base", "--diff", "tuned", "--json", "--quiet", *CPU)
    found = msgspec.json.decode(done.stdout, type=Comparison)
    assert (done.code, done.stderr, found.same) == (5, "", False)
    assert [entry.field for entry in found.differences] == ["content"]
    assert [entry.field for entry in found.not_compared] == ["model"]
    assert found.files == ("model.safetensors",)


def test_a_folder_that_is_called_as_a_rank_is_a_model(desk: Desk) -> None:
    write_llama(desk.root / "3")
    assert desk("base", "--diff", "3", *CPU).code == 0
    assert desk("3", "--diff", "base", *CPU).code == 0


def test_what_was_found_out_of_a_checkpoint_is_kept_when_its_files_are_settled(desk: Desk) -> None:
    kept = desk.places.instance().identity_folder
    for file in desk.base.iterdir():
        file.touch()
    first = desk("base", *CPU)
    assert not kept.exists()
    time.sleep(2.1)  # the change time of a file can not be set
    assert desk("base", *CPU).stdout == first.stdout
    assert len(list(kept.iterdir())) == 1
    assert desk("base", *CPU).stdout == first.stdout


def test_torch_is_not_imported(desk: Desk) -> None:
    program = (
        "import sys, wcache.cli\n"
        f"assert wcache.cli.run(['fingerprint', {str(desk.base)!r}, '--device', 'cpu']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment(desk.places), capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def up(desk: Desk) -> Iterator[Desk]:
    done = wcache(
        desk.places, "up", "--model", str(desk.base), "--tp", "3", "--slab-bytes", "2MiB", "-q",
        *CPU,
    )  # fmt: skip
    assert done.code == 0, done.stderr
    yield desk
    assert wcache(desk.places, "down", "--force").code == 0


@pytest.mark.process
def test_a_running_rank_is_compared_field_by_field(up: Desk) -> None:
    layout = ("--tp", "3", *CPU)
    same = up("base", "--running", "2", *layout)
    assert (same.code, same.stdout) == (0, "")
    check(up("tuned", "--running", "2", *layout), "fingerprint_running_other", up.root)
    check(
        up("base", "--running", "0", "--dtype", "float16"), "fingerprint_running_options", up.root
    )
    check(up("base", "--running", "2"), "fingerprint_running_layout", up.root)
    assert up("base", "--running", "3", *layout).code == 4
    for rank in range(3):
        file = str(up.places.rank(rank).fingerprint_file)
        assert up(file, "--running", str(rank)).code == 0
        assert up(file, "--running", str((rank + 1) % 3)).code == 5


@pytest.mark.process
def test_what_up_would_refuse_has_no_fingerprint_where_that_is_known(up: Desk) -> None:
    """Without asking transformers: what the first up was told is kept."""
    refused = wcache(up.places, "up", "--instance", "b", "--model", "base", "--tp", "4", *CPU)
    assert (refused.code, "tp 4 would split a head" in refused.stderr) == (78, True)
    done = up("base", "--tp", "4", *CPU)
    assert (done.code, done.stdout, done.stderr) == (78, "", refused.stderr)
    # What an engine has sharded in its own way can be compared all the same.
    compared = up("base", "--tp", "4", "--running", "0", *CPU)
    assert (compared.code, "tp_size" in compared.stdout) == (5, True)
    assert "warning: wcache up would refuse this: tp 4 would split a head" in compared.stderr


@pytest.mark.process
def test_a_rank_that_is_down_or_hangs_is_not_taken_for_one_that_does_not_exist(up: Desk) -> None:
    layout = ("--tp", "3", *CPU)
    assert wcache(up.places, "down", "1").code == 0
    down = up("base", "--running", "1", *layout)
    assert (down.code, down.stderr) == (3, "error: rank 1 is not up\nhint: wcache up starts it\n")
    found = ask(up.places.rank(2))
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    try:
        stuck = up("base", "--running", "2", *layout)
    finally:
        os.kill(found.pid, signal.SIGCONT)
    assert (stuck.code, "does not answer" in stuck.stderr) == (75, True)


@pytest.mark.process
def test_status_names_the_field_in_which_ranks_serve_other_weights(up: Desk) -> None:
    """The configuration is edited under a running rank."""
    config = load_config(up.places.instance().config_file)
    model = msgspec.structs.replace(config.model, dtype="float16")
    up.places.write_config(msgspec.structs.replace(config, model=model))
    status = wcache(up.places, "status", "1")
    assert status.code == 5
    assert "dtype: cached auto, wanted float16" in status.stderr
    found = json.loads(wcache(up.places, "status", "1", "--json").stdout)
    assert found["ranks"][0]["differences"] == [
        {"field": "dtype", "cached": "auto", "wanted": "float16"}
    ]


def test_what_is_printed_is_what_the_configuration_of_up_wants(desk: Desk) -> None:
    from wcache.config import Config, LayoutSection, ModelSection
    from wcache.fingerprint import wanted_by

    told = msgspec.json.decode(
        desk("base", "--tp", "3", "--rank", "1", "--json", *CPU).stdout, type=Fingerprint
    )
    config = Config(
        model=ModelSection(path=str(desk.base), content=told.content),
        layout=LayoutSection(tp=3),
    )
    assert compare(told, wanted_by(config, 1)) == ()


@pytest.mark.hostile
def test_a_file_that_is_no_fingerprint_is_named_in_a_line(desk: Desk) -> None:
    desk.write({"model": "a", "colour": "red"})
    check(desk("fp.json"), "fingerprint_no_fingerprint", desk.root)


@pytest.mark.hostile
def test_a_file_can_not_drive_the_terminal_or_fill_it(desk: Desk) -> None:
    file = desk.write({"model": "\x1b[2J\nready  ok", "content": "x" * 500_000})
    done = desk(file)
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert len(done.stdout) < 2000
    assert len(done.stdout.splitlines()) == 3
