"""02 under real torchrun with gloo: equal results at every world size, restarts, signals, nodes."""

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, environ, final_weights, largest_difference, losses, read_jsonl

import run
from common import UserError

SCRIPT = ROOT / "02_opt_multi_gpu_ddp.py"
PLAIN = ["--dtype", "float32", "--compile", "off"]


def flags(checkpoint, text, out, *more):
    """A micro run: 12 sequences of 32 tokens an update, validated on 7 sequences."""
    micro = ("--init", checkpoint, "--data", text, "--out", out, "--total-batch-size", 384,
             "--block-size", 32, "--max-steps", 6, "--learning-rate", 1e-3, "--val-tokens", 7 * 32,
             "--sample-every", 0, "--eval-every", 3, "--device", "cpu")
    return [*map(str, micro), *PLAIN, *map(str, more)]


def start(command, cwd):
    """A command as a process with its output as text."""
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=environ(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def torchrun(nproc, args, cwd, script=SCRIPT, launcher=("--standalone",)):
    logs = f"--log-dir={Path(cwd) / 'torchrun'}"  # otherwise it leaves a folder in /tmp
    return start([sys.executable, "-m", "torch.distributed.run", *launcher, logs,
                  f"--nproc_per_node={nproc}", script, *args], cwd)


def finish(process, code=0, timeout=150):
    """Wait for a process to end with code; its output."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{out}\n{err}") from None
    assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
    return out, err


@pytest.fixture(scope="module")
def single(tmp_path_factory, micro_checkpoint, text_file):
    """The run folder of 01 in one process."""
    cwd = tmp_path_factory.mktemp("single")
    args = flags(micro_checkpoint, text_file, "out")
    finish(start([sys.executable, ROOT / "01_opt_single_gpu.py", *args], cwd))
    return cwd / "out"


def assert_same_run(out, single):
    assert len(losses(single)) == 6
    assert max(abs(a - b) for a, b in zip(losses(out), losses(single), strict=True)) < 1e-4
    validations = [[row for row in read_jsonl(o / "metrics.jsonl") if "val_loss" in row]
                   for o in (out, single)]
    for a, b in zip(*validations, strict=True):
        assert a["val_tokens"] == b["val_tokens"] == 7 * 32
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=1e-6 if a["step"] == 0 else 1e-5)
    assert relative_difference(final_weights(out), final_weights(single)) < 1e-4


def relative_difference(a, b):
    """Norm of the difference of two weight dicts over the norm of b. Where a gradient is all
    rounding, Adam's first steps go up or down by the learning rate at random, so single weights
    may differ by that much."""
    square = lambda tensors: sum(t.double().square().sum() for t in tensors)
    return (square(a[name] - b[name] for name in a) / square(b.values())).sqrt().item()


@pytest.mark.parametrize("nproc, batch_size, compile", [
    (2, 3, "default"), (3, 4, "off"), (4, 1, "off")])
def test_losses_validation_and_weights_are_those_of_01(
        tmp_path, micro_checkpoint, text_file, single, nproc, batch_size, compile):
    args = flags(micro_checkpoint, text_file, "out", "--batch-size", batch_size,
                 "--compile", compile, "--sample-every", 3)
    out, err = finish(torchrun(nproc, args, tmp_path))
    assert_same_run(tmp_path / "out", single)
    assert out.count("sample: ") == 4  # rank 0 alone, and no rank waits for it
    torchs = re.compile("setting omp_num_threads|guards may run slower|warnings.warn")
    ours = [line for line in (out + err).lower().splitlines() if not torchs.search(line)]
    assert not [line for line in ours if "warning" in line]
    assert out.count("update    384 tokens") == 1
    assert len(list((tmp_path / "out").glob("*.json"))) == 2


def test_ranks_share_the_work_and_exchange_gradients_once_an_update(
        tmp_path, micro_checkpoint, text_file):
    """2 ranks x 3 micro-batches x 2 sequences, dropout on."""
    args = ["probe", *flags(micro_checkpoint, text_file, "out", "--batch-size", 2,
                            "--max-steps", 2, "--dropout", 0.1, "--eval-every", 0)]
    finish(torchrun(2, args, tmp_path, script=ROOT / "tests" / "ddp_probe.py"))
    a, b = (json.loads((tmp_path / f"probe.{rank}.json").read_text()) for rank in (0, 1))
    for seen in (a, b):
        for update in (seen["exchanges"][-6:-3], seen["exchanges"][-3:]):
            assert update[0] == update[1] == 0 < update[2]
    assert a["local"][-6] is None  # each update starts without gradients,
    assert a["local"][-5] != b["local"][-5]  # which stay a rank's own until the last micro-batch
    assert a["local"][-4] != b["local"][-4]
    assert all(x != y for x, y in zip(a["first_ids"], b["first_ids"]))
    assert all(x != y for x, y in zip(a["masks"][-6:], b["masks"][-6:]))  # dropout is a rank's own


def test_a_run_continues_at_another_world_size_and_from_01(
        tmp_path, micro_checkpoint, text_file, single):
    args = flags(micro_checkpoint, text_file, "out", "--save-every", 2, "--keep", 9)
    finish(start([sys.executable, ROOT / "01_opt_single_gpu.py", *args], tmp_path))
    for nproc, step in ((3, 2), (2, 4)):
        for path in (tmp_path / "out").glob("step_*.pt"):
            if int(path.stem[5:]) > step:
                path.unlink()
        out, _ = finish(torchrun(nproc, ["--resume", "--out", "out", "--device", "cpu"], tmp_path))
        assert f"at update {step}" in out
        assert_same_run(tmp_path / "out", single)


def wait_for(condition, timeout=120):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def workers(torchrun_process, count):
    """Process ids of torchrun's workers."""
    import psutil

    children = psutil.Process(torchrun_process.pid).children(recursive=True)
    return [p.pid for p in children if SCRIPT.name in " ".join(p.cmdline())][:count]


def test_a_killed_worker_restarts_the_job_from_its_last_checkpoint(
        tmp_path, micro_checkpoint, text_file):
    steps = ["--max-steps", 60, "--save-every", 5, "--eval-every", 0]
    finish(torchrun(2, flags(micro_checkpoint, text_file, "whole", *steps), tmp_path))
    args = flags(micro_checkpoint, text_file, "killed", *steps)
    process = torchrun(2, args, tmp_path, launcher=("--standalone", "--max-restarts=2"))
    wait_for(lambda: list((tmp_path / "killed").glob("step_00001*.pt")))
    os.kill(workers(process, 2)[1], signal.SIGKILL)
    out, err = finish(process)
    assert "continued from killed" in out
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    killed, whole = (final_weights(tmp_path / out) for out in ("killed", "whole"))
    assert largest_difference(killed, whole) == 0


@pytest.mark.parametrize("receiver", ["torchrun", "one worker"])
def test_sigterm_saves_and_ends_all_ranks(tmp_path, micro_checkpoint, text_file, receiver):
    args = flags(micro_checkpoint, text_file, "out", "--max-steps", 5000, "--eval-every", 0)
    process = torchrun(2, args, tmp_path)
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(losses(tmp_path / "out")) > 2)
    pids = workers(process, 2)
    os.kill(process.pid if receiver == "torchrun" else pids[1], signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert receiver == "torchrun" or err.count("exitcode: 143") + err.count("exitcode  : 143") > 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    saved = sorted((tmp_path / "out").glob("step_*.pt"))
    assert int(saved[-1].stem[5:]) == len(losses(tmp_path / "out"))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["interrupted_by"] == "SIGTERM"


def test_two_machines_train_as_one(tmp_path, micro_checkpoint, text_file, single):
    """Two torchrun agents with a c10d rendezvous on loopback, one worker each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
                "--rdzv-id=test", "--local-addr=127.0.0.1")
    args = flags(micro_checkpoint, text_file, "out")
    agents = [torchrun(1, args, tmp_path, launcher=launcher) for _ in range(2)]
    outputs = [finish(agent)[0] for agent in agents]
    assert_same_run(tmp_path / "out", single)
    assert sorted("step     5/6" in output for output in outputs) == [False, True]  # one writer


ERRORS = {
    "batch size": (["--total-batch-size", "320"], "not a multiple"),
    "data": (["--data", "missing.txt"], "missing.txt"),
    "folder": (["--out", "/proc/nothing"], "/proc/nothing"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_ends_every_rank_with_one_line(tmp_path, micro_checkpoint, text_file, name):
    more, expected = ERRORS[name]
    process = torchrun(3, flags(micro_checkpoint, text_file, "out", *more), tmp_path)
    _, err = finish(process, code=1, timeout=60)
    messages = [line for line in err.splitlines()
                if "error: " in line and SCRIPT.name in line and "torch" not in line]
    assert len(messages) == 1 and expected in messages[0]
    assert not (tmp_path / "out").exists()


def test_01_under_torchrun_is_refused(tmp_path, micro_checkpoint, text_file):
    args = flags(micro_checkpoint, text_file, "out")
    _, err = finish(torchrun(2, args, tmp_path, script=ROOT / "01_opt_single_gpu.py"), code=1)
    assert "use 02_opt_multi_gpu_ddp.py" in err and not (tmp_path / "out").exists()


def test_only_the_writer_asks_whether_the_folder_is_free(tmp_path, monkeypatch):
    """Rank 0 may have begun to write while another rank still starts."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    config = importlib.import_module("02_opt_multi_gpu_ddp").Config(out=str(tmp_path))
    assert run.find_run(config, "02_opt_multi_gpu_ddp", writes=False) == (tmp_path, None, None)
    with pytest.raises(UserError, match="holds a run already"):
        run.find_run(config, "02_opt_multi_gpu_ddp", writes=True)
