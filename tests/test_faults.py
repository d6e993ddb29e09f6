"""What goes wrong around a run: kills, disks, folders, odd machines, damage; and static checks."""

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields

import numpy as np
import psutil
import pytest
import torch
from conftest import MICRO, ROOT, SCRIPTS, command, environ, final_weights, largest_difference, read_jsonl, script
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import run

posix = pytest.mark.skipif(os.name != "posix", reason="forks, signals and limits of POSIX")

# -----------------------------------------------------------------------------
# Real processes of 00_orig.py, forked from one that has done the imports

SERVER = """
import importlib, json, os, resource, sys
import common, fineweb, run
import matplotlib.figure, torch._dynamo  # which a run imports late
script = importlib.import_module("00_orig")
common.get_tokenizer()
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitpid(order["wait"], 0)[1], flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        with open(order["log"], "w") as log:
            os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        if order["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["limit"],) * 2)
        sys.argv = ["00_orig.py", *order["flags"]]
        common.run_cli(lambda: script.main(run.parse_config(script.Config, script.__doc__)))
    print(pid, flush=True)
"""


class Forks:
    """start() a run of 00_orig.py in its own process, then wait() for its (exit code, output)."""

    def __init__(self, folder, checkpoint, text_file):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            cwd=folder,
            env=environ(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.folder, self.logs = folder, {}
        self.base = [
            "--init",
            str(checkpoint),
            "--data",
            str(text_file),
            "--device",
            "cpu",
            "--total-batch-size",
            "32",
            "--block-size",
            "16",
            "--learning-rate",
            "1e-3",
            "--eval-every",
            "0",
            "--sample-every",
            "0",
            "--val-tokens",
            "16",
        ]

    def ask(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *flags, limit=None):
        log = self.folder / f"log {len(self.logs)}"
        flags = [*([] if "--resume" in flags else self.base), *map(str, flags)]
        pid = self.ask(flags=flags, log=str(log), limit=limit)
        self.logs[pid] = log
        return pid

    def wait(self, pid):
        status = self.ask(wait=pid)
        return os.waitstatus_to_exitcode(status), self.logs[pid].read_text(encoding="utf-8")

    def run(self, *flags, limit=None):
        return self.wait(self.start(*flags, limit=limit))


@pytest.fixture(scope="module")
def forks(tmp_path_factory, text_file):
    """Forks whose runs start from a checkpoint of 4 channels: a few ms an update or a save."""
    folder = tmp_path_factory.mktemp("forks")
    small = common.GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=16)
    start = {"step": 0, "model": common.init_weights(small, 3), "model_config": asdict(small)}
    common.save_checkpoint(folder / "small.pt", start)
    forks = Forks(folder, folder / "small.pt", text_file)
    yield forks
    forks.process.stdin.close()
    forks.process.wait()


def wait_for(condition, timeout=60):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def steps(out):
    return [row["step"] for row in read_jsonl(out / "metrics.jsonl") if "loss" in row]


def assert_one_line(output, *parts):
    """output ends with the line of an error, and holds nothing of a traceback."""
    last = output.splitlines()[-1]
    assert last.startswith("00_orig.py: error: ") and all(part in last for part in parts), output
    assert "Traceback" not in output and "Exception ignored" not in output, output


@posix
def test_killed_twenty_times_the_run_ends_as_if_it_had_not_been(forks):
    """kill -9 while a checkpoint is written, or at random within the next updates and saves."""
    flags = ["--max-steps", 80, "--dropout", 0.1]
    assert forks.run("--out", "whole", *flags, "--save-every", 80)[0] == 0
    whole, out, rng = forks.folder / "whole", forks.folder / "killed", random.Random(0)
    pid = forks.start("--out", "killed", *flags, "--save-every", 1)
    seen, leftovers = set(), 0
    for kill in range(20):
        wait_for(lambda: set(out.glob("step_*.pt")) - seen)
        if kill % 2:
            wait_for(lambda: list(out.glob("step_0000*.pt.tmp")))
        else:
            time.sleep(rng.uniform(0, 0.03))
        os.kill(pid, signal.SIGKILL)
        assert forks.wait(pid)[0] == -signal.SIGKILL, "the run was over before the kills were"
        seen = set(out.glob("step_*.pt"))
        leftovers += len(list(out.glob("step_0000*.pt.tmp")))
        for path in seen:
            common.load_checkpoint(path)
        (out / "step_000999.pt.tmp").touch()  # as if another save had been hit
        pid = forks.start("--out", "killed", "--resume", "--device", "cpu")
    code, output = forks.wait(pid)
    assert code == 0, output
    assert leftovers > 0, "no kill hit a save"
    assert steps(out) == list(range(80)) == steps(whole)
    assert largest_difference(final_weights(out), final_weights(whole)) == 0
    assert not list(out.glob("*.tmp"))


@posix
@pytest.mark.parametrize(
    "limit, message",
    [
        (100_000, "checkpoint full{}/step_000002.pt could not be written (File too large)"),
        (4_000, "full{}/metrics.jsonl cannot be written (File too large)"),
    ],
)
def test_a_write_that_fails_ends_the_run_and_leaves_what_was_whole(forks, limit, message):
    """Files may not grow beyond limit bytes; a checkpoint has 2.4 MB, a line of metrics 0.2 kB."""
    out = forks.folder / f"full{limit}"
    assert forks.run("--out", out.name, "--max-steps", 2, "--save-every", 2)[0] == 0
    every = 0 if limit < 10_000 else 2
    flags = ["--max-steps", 60, "--save-every", every]
    code, output = forks.run("--out", out.name, "--resume", *flags, limit=limit)
    assert code == 2
    assert_one_line(output, message.format(limit))
    assert common.load_checkpoint(out / "step_000002.pt")["step"] == 2
    assert not list(out.glob("*.tmp"))
    code, output = forks.run("--out", out.name, "--resume", "--max-steps", 6, "--save-every", 2)
    assert code == 0 and steps(out) == list(range(6))


@pytest.fixture
def mounted(tmp_path):
    """mounted(options) -> a small file system in memory, mounted with these."""
    mounts = []

    def mount(options):
        folder = tmp_path / f"mount {len(mounts)}"
        folder.mkdir()
        attempt = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        if subprocess.run(attempt, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        mounts.append(folder)
        return folder

    if shutil.which("mount") is None:
        pytest.skip("no mount here")
    yield mount
    for folder in mounts:
        subprocess.run(["umount", folder], check=True)


@posix
def test_a_full_disk_ends_the_run_and_spares_older_checkpoints(forks, mounted):
    out = mounted("size=6m") / "run"  # two checkpoints, not three
    code, output = forks.run("--out", out, "--max-steps", 9, "--save-every", 1)
    assert code == 2
    assert_one_line(output, "step_000003.pt could not be written (No space left on device)")
    assert [common.load_checkpoint(path)["step"] for path in common.find_checkpoints(out)] == [1, 2]
    assert not list(out.glob("*.tmp")) and steps(out) == [0, 1, 2]


@posix
def test_a_read_only_folder_is_refused_at_the_start(forks, mounted):
    folder = mounted("ro")
    code, output = forks.run("--out", folder / "run", "--max-steps", 9)
    assert code == 2 and output.count("\n") == 1
    assert_one_line(output, "cannot be written (Read-only file system)")


@posix
@pytest.mark.parametrize("save_every", [5, 0])
def test_a_folder_that_vanishes_ends_the_run(forks, save_every):
    out = forks.folder / f"vanishing{save_every}"
    pid = forks.start("--out", out.name, "--max-steps", 80, "--save-every", save_every)
    metrics = out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size > 300)
    out.rename(out.with_name(out.name + " moved"))
    code, output = forks.wait(pid)
    assert code == 2
    assert_one_line(output, out.name, "No such file or directory")
    assert not out.exists()


@posix
def test_of_two_runs_that_start_in_one_folder_one_trains(forks):
    out = forks.folder / "shared"
    pids = [forks.start("--out", "shared", "--max-steps", 60, "--save-every", 1) for _ in range(2)]
    wait_for(lambda: common.find_checkpoints(out))
    third, output = forks.run("--out", "shared", "--resume", "--device", "cpu")
    assert third == 2
    assert_one_line(output, "another process is training in this folder")
    ends = sorted((forks.wait(pid) for pid in pids), key=lambda end: end[0])
    (won, _), (lost, output) = ends
    assert (won, lost) == (0, 2)
    assert_one_line(output, "--out shared: ")
    assert steps(out) == list(range(60))


def test_a_folder_that_another_run_took_meanwhile_is_left_alone(micro, tmp_path, monkeypatch):
    """The other is there and gone between the look at the folder and the lock."""
    load_data = common.load_data

    def meanwhile(data):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 0, "loss": 9}\n')
        return load_data(data)

    monkeypatch.setattr(run, "load_data", meanwhile)
    with pytest.raises(common.UserError, match="another process has trained"):
        micro("00_orig", "a")
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == '{"step": 0, "loss": 9}\n'


# -----------------------------------------------------------------------------
# Odd machines


def micro_flags(checkpoint, text_file, *more):
    return [
        "--init",
        checkpoint,
        "--data",
        text_file,
        "--device",
        "cpu",
        "--total-batch-size",
        64,
        "--block-size",
        32,
        "--max-steps",
        3,
        "--learning-rate",
        1e-3,
        "--val-tokens",
        32,
        *more,
    ]


@posix
def test_a_poor_machine_trains_all_the_same(tmp_path, micro_checkpoint, text_file):
    """No compiler, network, display, home or stdin; an ASCII locale, a pipe, a folder not ASCII."""
    folder = tmp_path / "a folder é 語"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    none, nowhere = str(tmp_path / "none"), "http://127.0.0.1:9"
    odd = {
        "PATH": str(tmp_path / "bin"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
        "HOME": none,
        "TIKTOKEN_CACHE_DIR": none,
        "https_proxy": nowhere,
        "HTTPS_PROXY": nowhere,
    }
    absent = ("DISPLAY", "CC", "CXX")
    env = {name: value for name, value in environ(**odd).items() if name not in absent}
    flags = map(str, [*micro_flags(micro_checkpoint, text_file), "--dtype", "float32"])
    result = subprocess.run(
        [sys.executable, ROOT / "01_opt_single_gpu.py", *flags],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    out, err = result.stdout.decode("ascii"), result.stderr.decode("ascii")
    assert result.returncode == 0, err
    assert out.count("warning: torch.compile does not work here") == 1
    assert "compile   off (not available)" in out
    assert "Traceback" not in err and "warn" not in err.lower().replace("matplotlib", ""), err
    (made,) = (folder / "log" / "01_opt_single_gpu").iterdir()
    assert {path.name for path in made.iterdir()} >= {"metrics.jsonl", "summary.json", "loss.png", "step_000003.pt"}


@posix
@pytest.mark.parametrize("redirection, code", [("| head -1", 141), (">&- 2>&- <&-", 0), ("2>&- | cat > /dev/null", 0)])
def test_streams_that_are_closed(tmp_path, micro_checkpoint, text_file, redirection, code):
    """set -o pipefail: the code is python's."""
    flags = micro_flags(micro_checkpoint, text_file, "--out", "a", "--max-steps", 30, "--save-every", 30)
    line = " ".join(f"'{part}'" for part in (sys.executable, ROOT / "00_orig.py", *flags))
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} {redirection}"],
        cwd=tmp_path,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (result.returncode, result.stderr) == (code, "")
    if code == 0:
        assert common.load_checkpoint(tmp_path / "a" / "step_000030.pt")["step"] == 30
        assert json.loads((tmp_path / "a" / "summary.json").read_text())["tokens"] == 30 * 64


def test_shards_whose_names_are_not_utf8_have_a_fingerprint():
    tokens = [np.zeros(9, dtype=np.uint16)]
    a, b = (common.Data(tokens, tokens, [name], ["val"], "x", is_text=False) for name in ("\udce9.npy", "\udcea.npy"))
    assert a.fingerprint != b.fingerprint


def test_a_long_run_over_shards_holds_no_memory_and_no_files(micro, monkeypatch, tmp_path):
    """1,500 updates; between update 500 and the last nothing grows."""
    small = common.GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=8)
    monkeypatch.setitem(common.PRESETS, "tiny", small)
    (tmp_path / "data").mkdir()
    for name in ("train_1", "train_2", "val_0"):
        tokens = np.random.default_rng(0).integers(0, 50257, 3000, dtype=np.uint16)
        np.save(tmp_path / "data" / f"x_{name}.npy", tokens)
    me, used, log_update = psutil.Process(), {}, run.Run.log_update

    def measured(self, step, *args):
        if step in (500, 1499):
            used[step] = me.memory_info().rss, len(me.open_files())
        log_update(self, step, *args)

    monkeypatch.setattr(run.Run, "log_update", measured)
    out = micro("00_orig", "a", data="data", max_steps=1500, total_batch_size=8, val_tokens=8, save_every=300)
    (rss, files), (last_rss, last_files) = used[500], used[1499]
    assert last_rss - rss < 8e6 and last_files == files
    assert steps(out) == list(range(1500))


# -----------------------------------------------------------------------------
# Damaged files and strange numbers


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    """(path, bytes, weights) of the smallest checkpoint there can be."""
    small = common.GPTConfig(n_layer=1, n_head=1, n_embd=1, block_size=1)
    path, weights = tmp_path_factory.mktemp("fuzz") / "x.pt", common.init_weights(small, 0)
    common.save_checkpoint(path, {"step": 5, "model": dict(weights), "model_config": asdict(small)})
    return path, path.read_bytes(), weights


@given(data=st.data())
@settings(max_examples=120)
def test_a_damaged_checkpoint_is_refused_or_read_right(tiny_file, data):
    path, content, weights = tiny_file
    # the words of zip and pickle are at both ends
    ends = st.integers(0, 1500) | st.integers(1, 4000).map(lambda n: len(content) - n)
    places = st.lists(ends | st.integers(0, len(content) - 1), min_size=1, max_size=3)
    damaged = bytearray(content)
    for place in data.draw(places):
        damaged[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged[: data.draw(places)[0]] if data.draw(st.booleans()) else damaged)
    try:
        checkpoint = common.load_checkpoint(path)
    except common.UserError as error:
        assert str(path) in str(error)
    else:
        assert checkpoint["step"] == 5 and largest_difference(checkpoint["model"], weights) == 0


def test_one_bit_that_turns_a_tensor_into_a_folder_is_damage(tiny_file):
    """torch reads nothing then, and gives out whatever was in memory."""
    path, content, _ = tiny_file
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))  # in the zip's directory
    path.write_bytes(content[: entry + 38] + b"\x10" + content[entry + 39 :])  # external attributes
    with pytest.raises(common.UserError, match="damaged in .*data/0"):
        common.load_checkpoint(path)


ROWS = [{"step": i, "loss": 10 - i / 7, "lr": 1e-3, "grad_norm": None if i == 3 else 1.5} for i in range(8)]
BROKEN = st.text(alphabet='[{"step": 1, NaN}\n\\u', max_size=40).map(str.encode)


@given(tail=st.binary(max_size=80) | BROKEN, whole=st.integers(0, 8), cut=st.integers(0, 40))
@settings(max_examples=150)
def test_metrics_are_read_up_to_what_is_damaged(tmp_path_factory, tail, whole, cut):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    path.write_bytes(b"".join(lines[:whole]) + (lines[whole][:cut] if whole < 8 else b"") + tail)
    rows = run.read_metrics(path)
    assert rows[:whole] == ROWS[:whole] and all(isinstance(row, dict) for row in rows)
    run.keep_metrics_before(path, 4)
    assert read_jsonl(path)[: min(whole, 4)] == ROWS[: min(whole, 4)]
    assert all(row["step"] < 4 for row in read_jsonl(path))


NUMBERS = (
    st.integers(-3, 70)
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([256, 1024, 4096, 524288])
    | st.floats()
    | st.sampled_from([1e-3, 0.1, 0.5, 1.0])
)


def numeric_flags():
    """A dict of some numeric flags with numbers of their type."""
    whole = NUMBERS.filter(lambda x: isinstance(x, int))
    fractions = NUMBERS.filter(lambda x: isinstance(x, float))
    kinds = {
        f.name: fractions if "float" in str(f.type) else whole
        for f in fields(script("00_orig").Config)
        if f.name in run.RANGES
    }
    return st.fixed_dictionaries({}, optional=kinds)


@given(
    flags=numeric_flags(),
    usual=st.booleans(),
    world_size=st.integers(1, 5),
    name=st.sampled_from(SCRIPTS),
    preset=st.sampled_from(["tiny", "gpt2"]),
    is_text=st.booleans(),
    most=st.sampled_from([1, 4, 64]),
)
@settings(max_examples=400)
def test_numbers_give_an_error_or_fit_together(flags, usual, world_size, name, preset, is_text, most):
    if usual:  # half of the time numbers in their range, or hardly any would pass
        flags = {k: v for k, v in flags.items() if run.RANGES[k][0] <= v <= run.RANGES[k][1]}
    module, model_config = script(name), common.PRESETS[preset]
    config = module.Config(preset=preset, **flags)
    arrays = [np.zeros(5000, dtype=np.uint16)]
    data = common.Data(arrays, arrays, ["x"], ["x"], "x", is_text)
    try:
        c = run.resolve(config, model_config, data, torch.device("cpu"), most, world_size)
    except common.UserError as error:
        assert str(error).startswith("--")
        return
    assert all(getattr(c, f.name) is not None for f in fields(c) if f.name != "out")
    assert all(low <= getattr(c, key) <= high for key, (low, high) in run.RANGES.items())
    assert all(getattr(c, key) == value for key, value in flags.items())
    assert c.total_batch_size % (c.batch_size * c.block_size * world_size) == 0
    assert c.block_size <= model_config.block_size and c.min_lr <= c.learning_rate
    if "batch_size" not in flags:
        assert c.batch_size <= most
    rates = [module.get_lr(step, c) for step in {0, c.max_steps // 2, c.max_steps - 1}]
    assert all(0 <= rate <= c.learning_rate * (1 + 1e-9) for rate in rates)


@given(total=st.integers(1, 5000), B=st.integers(1, 9), T=st.integers(1, 64), world_size=st.integers(1, 5))
def test_the_nearest_totals_are_multiples_and_the_nearest(total, B, T, world_size):
    config = script("00_orig").Config(total_batch_size=total, batch_size=B, block_size=T)
    unit = B * T * world_size
    try:
        assert run.resolve_batch_size(config, MICRO, torch.device("cpu"), 64, world_size) == B
        assert total % unit == 0
    except common.UserError as error:
        nearest = [int(n) for n in str(error).split("are: ")[1].split(" and ")]
        expected = [n for n in range(unit, total + unit + 1, unit) if abs(n - total) < unit]
        assert nearest == expected and total % unit


# -----------------------------------------------------------------------------
# The sources

MODULES = [*SCRIPTS, "common", "run", "fineweb", "hellaswag", "hf_weights", "check_numerics", "sampling_cpu_mps"]


def test_importing_has_no_effect(tmp_path):
    """No output, file, process, connection or handler: multiprocessing may import them anew."""
    code = f"""
import importlib, signal, sys, threading
import filelock, matplotlib, numpy, requests, safetensors.torch, tiktoken, huggingface_hub
import torch, torch.distributed, torch.nn.attention, torch.nn.parallel, torch.utils.data
import torch.utils._python_dispatch
events = ("os.mkdir", "os.remove", "os.rename", "os.fork", "socket.connect", "socket.getaddrinfo",
          "subprocess.Popen")
def watch(event, args):
    if event == "open" and (set(str(args[1])) & set("wax+")) or event in events:
        print(event, args)
sys.addaudithook(watch)
def state():
    random = torch.get_rng_state().sum()
    return signal.getsignal(signal.SIGINT), threading.active_count(), random
before = state()
for name in {MODULES}:
    importlib.import_module(name)
assert before == state()
"""
    result = command("-W", "error::DeprecationWarning:__main__", "-c", code, cwd=tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def calls(source):
    """(dotted name, positional arguments, {keyword: its value}, line) of every call in source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
            yield ast.unparse(node.func), [ast.unparse(a) for a in node.args], keywords, node.lineno


def faults(source):
    """What the source does that it must not, as (line, what)."""
    for name, args, keywords, line in calls(source):
        last = name.split(".")[-1]
        located = len(args) > 1 or "map_location" in keywords
        if name == "torch.load" and (keywords.get("weights_only") != "True" or not located):
            yield line, "torch.load without weights_only=True or map_location"
        if name in ("np.load", "numpy.load") and keywords.get("allow_pickle") != "False":
            yield line, "np.load without allow_pickle=False"
        rest = args[1:] if name in ("open", "io.open") and len(args) > 1 else args
        mode = keywords.get("mode", rest[0] if rest else "'r'")
        is_open = (
            name in ("open", "io.open", "os.fdopen") or last == "open" and name.startswith(("path", "Path", "self"))
        )
        if is_open and "b" not in mode and "encoding" not in keywords:
            yield line, "text opened without encoding"
        if "." in name and last in ("read_text", "write_text") and "encoding" not in keywords:
            yield line, f"{last} without encoding"
        if keywords.get("verify") == "False":
            yield line, "verify=False"
    for n, text in enumerate(source.splitlines(), 1):
        if any(word in text for word in ("allow_tf32", "fp32_precision")):
            yield n, "another TF32 switch than set_float32_matmul_precision"


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("benchmarks/*.py"))], ids=lambda path: path.name
)
def test_sources_read_and_write_safely(path):
    assert list(faults(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p)",
        "torch.load(p, weights_only=True)",
        "torch.load(p, 'cpu')",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "open(p)",
        "open(p, 'w')",
        "path.open()",
        "p.read_text()",
        "p.write_text(x)",
        "requests.get(u, verify=False)",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "torch.backends.fp32_precision = 'tf32'",
    ],
)
def test_unsafe_sources_are_seen(source):
    assert len(list(faults(source))) == 1
    assert not list(faults("torch.load(p, 'cpu', weights_only=True)"))
    assert not list(faults("open(p, 'rb'); open(p, encoding='utf-8')"))
