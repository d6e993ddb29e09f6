"""Shared by all tests: the scripts as modules, a micro model, runs in process and as commands."""

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import hypothesis
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402

MICRO = common.GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64)
SCRIPTS = ["00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"]
PLAIN = {"dtype": "float32", "compile": "off"}  # what makes 01 and 02 compute as 00 does

torch.set_num_threads(1)
if threading.current_thread() is threading.main_thread():
    # a shell ignores it for what it starts in the background, and commands would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")


def script(name):
    return importlib.import_module(name)


def environ(**extra):
    """The environment of a command: one thread, nothing of a launcher that runs the tests."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items()
                 if not k.startswith("TORCHELASTIC") and k not in launcher}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | extra


def command(*args, cwd, timeout=120, **env):
    """Run python with args in cwd; the finished process with its output as text."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=environ(**env),
                          capture_output=True, text=True, timeout=timeout)


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def losses(out):
    return [row["loss"] for row in read_jsonl(Path(out) / "metrics.jsonl") if "loss" in row]


def final_weights(out):
    return common.load_checkpoint(sorted(Path(out).glob("step_*.pt"))[-1])["model"]


def largest_difference(a, b):
    """Largest absolute difference between two canonical weight dicts."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """About 9,000 tokens of real text: the first topics of Python's language reference."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "some text é.txt"
    text = "<|endoftext|>".join(topics[name] for name in sorted(topics)[:8])
    path.write_text(text[:40000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def micro_checkpoint(tmp_path_factory):
    """A checkpoint of MICRO with random weights, for --init in commands."""
    path = tmp_path_factory.mktemp("micro") / "micro.pt"
    weights = common.init_weights(MICRO, seed=7)
    common.save_checkpoint(path, {"step": 0, "model": weights, "model_config": asdict(MICRO)})
    return path


@pytest.fixture
def micro(monkeypatch, tmp_path, text_file):
    """Run a script's main() on MICRO: micro("00_orig", out="a", max_steps=3) -> tmp_path / "a"."""
    monkeypatch.setitem(common.PRESETS, "tiny", MICRO)
    monkeypatch.chdir(tmp_path)

    def run(name, out, **settings):
        module = script(name)
        defaults = dict(data=str(text_file), total_batch_size=256, max_steps=6, learning_rate=1e-3,
                        sample_every=0, eval_every=0, save_every=1000, device="cpu")
        if name != "00_orig":
            defaults |= PLAIN
        try:
            module.main(module.Config(**(defaults | settings | {"out": str(out)})))
        finally:
            common.end_process_group()
        return tmp_path / out

    return run
