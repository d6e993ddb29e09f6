"""The run folder: log, checkpoints, resuming, errors, signals; in process on a micro model."""

import gc
import json
import math
import os
import signal
import time
from dataclasses import asdict

import pytest
import torch
from conftest import MICRO, SCRIPTS, final_weights, largest_difference, losses, read_jsonl, script

import common
import run

AS_BEFORE = dict(resume=True, max_steps=None, total_batch_size=None, learning_rate=None)


def rows(out, key):
    return [row for row in read_jsonl(out / "metrics.jsonl") if key in row]


# -----------------------------------------------------------------------------
# Log and summary


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_leaves_what_is_documented(micro, name):
    out = micro(name, "a", max_steps=4, eval_every=2, save_every=2, sample_every=2)
    updates = rows(out, "loss")
    assert [row["step"] for row in updates] == [0, 1, 2, 3]
    assert set(updates[0]) == {"step", "loss", "lr", "grad_norm", "dt", "tok_per_sec", "mfu"}
    assert all(row["tok_per_sec"] == pytest.approx(256 / row["dt"]) for row in updates)
    assert [set(row) for row in rows(out, "val_loss")] == [{"step", "val_loss", "val_tokens"}] * 3
    assert sorted(p.name for p in out.glob("*") if p.name[0] != ".") == [
        "loss.png", "metrics.jsonl", "run.json", "step_000002.pt", "step_000004.pt", "summary.json"]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((out / "summary.json").read_text())
    steady = sorted(row["tok_per_sec"] for row in updates[1:])
    assert summary["train_tok_per_sec"] == pytest.approx(steady[1])
    assert summary["cold_start_s"] == updates[0]["dt"]
    assert summary["tokens"] == 4 * 256 and summary["loss"] == updates[-1]["loss"]
    assert summary["val_loss"] == rows(out, "val_loss")[-1]["val_loss"]
    assert summary["script"] == name and summary["config"]["total_batch_size"] == 256
    assert 1e8 < summary["peak_memory_bytes"] < 1e10
    assert summary["environment"].keys() >= {
        "python", "torch", "device", "threads", "matmul_precision"}
    assert 0 < summary["end_to_end_tok_per_sec"] < summary["train_tok_per_sec"]


def test_evaluation_is_not_in_an_updates_time(micro, monkeypatch):
    module = script("00_orig")
    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *args: time.sleep(1) or evaluate(*args))
    out = micro("00_orig", "a", max_steps=4, eval_every=1, total_batch_size=64)
    assert len(rows(out, "val_loss")) == 5
    assert min(row["dt"] for row in rows(out, "loss")) < 1


def test_tokens_per_second_and_mfu_count_all_ranks_tokens_once(micro, monkeypatch):
    """2 s an update of 2 ranks x 4 sequences x 8 tokens x 3 micro-batches: 96 tok/s."""
    log = run.Run.__new__(run.Run)
    log.config = script("00_orig").Config(total_batch_size=2 * 4 * 8 * 3, max_steps=1, warmup_steps=1)
    log.model_config = MICRO
    log.flops_per_token, log.peak, log.world_size, log.dts, log.tokens = 1e6, 1e9, 2, [], 0
    log.scaler, log.profiler, log.overflows = None, None, 0
    log.bar = type("Bar", (), {"update": lambda self: None})()
    written = {}
    log.write_metrics = lambda **metrics: written.update(metrics)
    log.log_update(0, 1.0, 1e-3, 1.0, 2.0)
    assert written["tok_per_sec"] == 96
    assert written["mfu"] == pytest.approx(96 * 1e6 / (2 * 1e9))


@pytest.mark.parametrize("total, noted", [(256, True), (512, False), (8192, False), (16384, True)])
def test_an_unusual_number_of_tokens_per_update_is_noted(micro, capsys, total, noted):
    """The tiny recipe has 2,048; a factor of 4 is let pass."""
    micro("00_orig", "a", total_batch_size=total, max_steps=1)  # learning rate 1e-3, as is usual
    note = f"an update is usually 2,048 tokens here, for which the learning rate was chosen; with {total:,}"
    assert (note in capsys.readouterr().out) == noted


@pytest.mark.parametrize("learning_rate, warned", [(1e-3, 0), (30.0, 1)])
def test_learning_nothing_is_said_once(micro, capsys, learning_rate, warned):
    micro("01_opt_single_gpu", "a", max_steps=23, learning_rate=learning_rate, warmup_steps=2)
    assert capsys.readouterr().out.count("warning: after 20 updates the loss is") == warned


def test_a_run_that_failed_before_its_first_update_does_not_occupy_its_folder(micro, monkeypatch):
    log_update = run.Run.log_update

    def out_of_memory(*args):
        raise MemoryError

    monkeypatch.setattr(run.Run, "log_update", out_of_memory)
    with pytest.raises(MemoryError):
        micro("00_orig", "a", max_steps=2, eval_every=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what keeps the Run, and its lock,
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.collect()  # goes with a process
    monkeypatch.setattr(run.Run, "log_update", log_update)
    out = micro("00_orig", "a", max_steps=2, eval_every=1)
    assert [row["step"] for row in rows(out, "val_loss")] == [0, 1, 2]
    with pytest.raises(common.UserError, match="holds a run already"):
        micro("00_orig", "a", max_steps=2)


# -----------------------------------------------------------------------------
# Checkpoints and resuming


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_resumed_run_ends_with_the_same_weights_bit_by_bit(micro, name):
    """Dropout on, across an epoch border (about 120 sequences, 4 an update)."""
    whole = micro(name, "whole", max_steps=36, dropout=0.1, save_every=18, block_size=64)
    part = micro(name, "part", max_steps=36, dropout=0.1, save_every=18, block_size=64)
    (part / "step_000036.pt").unlink()
    micro(name, "part", eval_every=None, save_every=None, **AS_BEFORE)
    assert losses(part) == losses(whole) and len(losses(part)) == 36
    assert largest_difference(final_weights(part), final_weights(whole)) == 0
    a, b = (common.load_checkpoint(out / "step_000036.pt")["optimizer"] for out in (part, whole))
    assert a["step"] == b["step"] == 36
    assert largest_difference(a["exp_avg_sq"], b["exp_avg_sq"]) == 0


def test_any_script_continues_the_run_of_any_other(micro):
    whole = losses(micro("00_orig", "whole", max_steps=6))
    micro("00_orig", "part", max_steps=6, save_every=2, keep=9)
    for name, step in (("01_opt_single_gpu", 2), ("02_opt_multi_gpu_ddp", 4), ("00_orig", 2)):
        for path in run.Path("part").glob("step_*.pt"):
            if int(path.stem[5:]) > step:
                path.unlink()
        out = micro(name, "part", save_every=None, **AS_BEFORE)
        assert max(abs(a - b) for a, b in zip(losses(out), whole, strict=True)) < 1e-4


def test_checkpoints_are_plain_canonical_and_interchangeable(micro):
    shapes = common.canonical_shapes(MICRO)
    for name in SCRIPTS:
        out = micro(name, name, max_steps=2)
        saved = torch.load(out / "step_000002.pt", weights_only=True, map_location="cpu")
        found = {k: tuple(t.shape) for k, t in saved["model"].items()}
        assert found == shapes | {"lm_head.weight": (50257, 32)}
        assert saved["step"] == 2
    for name in SCRIPTS:  # each starts from the others' weights with the same first loss
        outs = [micro(name, f"{name}-{other}", init=f"{other}/step_000002.pt", max_steps=1)
                for other in SCRIPTS]
        first = [losses(out)[0] for out in outs]
        assert max(first) - min(first) < 1e-4 and first[0] < 10.7


def test_the_last_checkpoints_stay(micro):
    out = micro("00_orig", "a", max_steps=6, save_every=1, keep=3)
    assert sorted(p.name for p in out.glob("step_*")) == [
        "step_000004.pt", "step_000005.pt", "step_000006.pt"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_newest_checkpoint_is_skipped_and_named(micro, damage, capsys):
    out = micro("00_orig", "a", max_steps=6, save_every=3)
    whole, newest = losses(out), out / "step_000006.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # one bit of a tensor, which torch.load would take
    cut = content[: len(content) // 2]
    newest.write_bytes({"cut": cut, "flipped": content, "empty": b""}[damage])
    micro("00_orig", "a", save_every=None, **AS_BEFORE)
    printed = capsys.readouterr().out
    assert "skipped" in printed and "step_000006.pt" in printed and "at update 3" in printed
    assert losses(out) == whole


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "step_000001.pt"
    good = {"step": 1, "model": common.init_weights(MICRO, 0), "model_config": asdict(MICRO)}
    common.save_checkpoint(path, good)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(common.UserError, match="No space left"):
        common.save_checkpoint(path, good | {"step": 2})
    assert common.load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "pwned"),))

    torch.save({"step": 0, "model": {}, "model_config": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(common.UserError):
        common.load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_a_folder_that_holds_a_run_is_not_overwritten(micro):
    out = micro("00_orig", "a", max_steps=2)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(common.UserError, match="--resume"):
        micro("00_orig", "a", max_steps=2)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_two_processes_do_not_train_in_one_folder(micro, tmp_path):
    out = micro("00_orig", "a", max_steps=2)
    with run.FileLock(out / ".lock"):
        with pytest.raises(common.UserError, match="another process"):
            micro("00_orig", "a", **AS_BEFORE | {"max_steps": 4})


@pytest.mark.parametrize("setting, value", [
    ("seed", 5), ("total_batch_size", 512), ("block_size", 32), ("preset", "gpt2")])
def test_a_resumed_run_keeps_what_decides_its_data(micro, setting, value):
    micro("00_orig", "a", max_steps=2)
    with pytest.raises(common.UserError, match=f"--{setting.replace('_', '-')} {value}"):
        settings = {"max_steps": 4, "total_batch_size": None} | {setting: value}
        micro("00_orig", "a", resume=True, **settings)


def test_a_resumed_run_refuses_other_data(micro, tmp_path):
    micro("00_orig", "a", max_steps=2)
    (tmp_path / "other.txt").write_text("something else entirely " * 900)
    with pytest.raises(common.UserError, match="not the tokens"):
        micro("00_orig", "a", resume=True, max_steps=4, total_batch_size=None,
              data=str(tmp_path / "other.txt"))


def test_a_resumed_run_may_go_on_longer(micro):
    micro("00_orig", "a", max_steps=2)
    out = micro("00_orig", "a", resume=True, max_steps=4, total_batch_size=None, learning_rate=None)
    assert [row["step"] for row in rows(out, "loss")] == [0, 1, 2, 3]


def test_metrics_cut_short_by_a_crash_are_mended_on_resume(micro):
    out = micro("00_orig", "a", max_steps=4, save_every=2)
    whole = losses(out)
    (out / "step_000004.pt").unlink()
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    micro("00_orig", "a", save_every=None, **AS_BEFORE)
    assert losses(out) == whole


# -----------------------------------------------------------------------------
# What goes wrong


def spoil(monkeypatch, name, at, value=math.nan, times=1):
    """Make the gradients of one weight value in updates at ... at + times - 1."""
    module, count = script(name), [0]
    clip = module.nn.utils.clip_grad_norm_

    def spoiled(parameters, max_norm):
        parameters = list(parameters)
        if at <= count[0] < at + times:
            parameters[-1].grad.fill_(value)
        count[0] += 1
        return clip(parameters, max_norm)

    monkeypatch.setattr(module.nn.utils, "clip_grad_norm_", spoiled)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite_end_the_run_with_the_good_checkpoint_kept(
        micro, monkeypatch, name, value, tmp_path):
    spoil(monkeypatch, name, at=3, value=value)
    with pytest.raises(common.UserError, match=r"update 3: .*step_000002.pt.*--learning-rate"):
        micro(name, "a", max_steps=6, save_every=2)
    weights = final_weights(tmp_path / "a")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def overflow(monkeypatch, times):
    """Make the first times backward passes of the scaled loss overflow."""
    unscale, count = torch.amp.GradScaler.unscale_, [0]

    def overflowing(scaler, optimizer):
        if count[0] < times:
            optimizer.param_groups[0]["params"][0].grad.view(-1)[0] = math.inf
        count[0] += 1
        return unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", overflowing)


def test_a_float16_overflow_skips_the_step_and_halves_the_scale(micro, monkeypatch):
    overflow(monkeypatch, times=1)
    out = micro("01_opt_single_gpu", "a", dtype="float16", max_steps=2, total_batch_size=64,
                block_size=32, save_every=1)
    first, second = (common.load_checkpoint(out / f"step_00000{i}.pt") for i in (1, 2))
    initial = common.init_weights(MICRO, 1337)
    assert largest_difference(first["model"], initial) == 0 and first["optimizer"]["step"] == 0
    assert first["scaler"]["scale"] == 2**15 and first["scaler"]["_growth_tracker"] == 0
    assert largest_difference(second["model"], initial) > 0
    assert second["scaler"]["_growth_tracker"] == 1
    assert rows(out, "loss")[0]["grad_norm"] is None


def test_overflows_without_end_stop_the_run(micro, monkeypatch):
    overflow(monkeypatch, times=99)
    with pytest.raises(common.UserError, match="20 overflows in a row"):
        micro("01_opt_single_gpu", "a", dtype="float16", max_steps=30, total_batch_size=8,
              block_size=8)


def test_the_scaler_goes_on_where_it_was(micro, monkeypatch):
    settings = dict(dtype="float16", total_batch_size=64, block_size=32, save_every=1)
    overflow(monkeypatch, times=2)
    out = micro("01_opt_single_gpu", "a", max_steps=3, **settings)
    micro("01_opt_single_gpu", "a", resume=True, max_steps=4, dtype="float16",
          total_batch_size=None)
    scaler = common.load_checkpoint(out / "step_000004.pt")["scaler"]
    assert scaler["scale"] == 2**14 and scaler["_growth_tracker"] == 2


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_signal_finishes_the_update_saves_and_exits(
        micro, monkeypatch, tmp_path, name, signum, code):
    module = script(name)
    step = torch.optim.AdamW.step

    def interrupted(optimizer, *args, **kwargs):
        os.kill(os.getpid(), signum)
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    handler = signal.getsignal(signum)
    with pytest.raises(SystemExit) as stopped:
        micro(name, "a", max_steps=6)
    assert stopped.value.code == code
    assert signal.getsignal(signum) == handler
    assert [p.name for p in (tmp_path / "a").glob("step_*")] == ["step_000001.pt"]
    assert len(losses(tmp_path / "a")) == 1
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["interrupted_by"] == signal.Signals(signum).name
    assert module.Config().resume is False


def test_without_saving_nothing_is_saved(micro):
    out = micro("00_orig", "a", max_steps=2, save_every=0, eval_every=0, sample_every=0)
    assert not list(out.glob("*.pt")) and [row["step"] for row in rows(out, "val_loss")] == [0]


def test_profile_writes_a_trace(micro):
    out = micro("01_opt_single_gpu", "a", max_steps=7, profile=True)
    assert "traceEvents" in json.loads((out / "trace.json").read_text())


def test_a_resumed_run_keeps_the_micro_batch_that_was_chosen(micro):
    """It decides how sums are rounded and dropout is drawn."""
    out = micro("01_opt_single_gpu", "a", max_steps=2, save_every=2, batch_size=None)
    assert json.loads((out / "run.json").read_text())["config"]["batch_size"] == 4
    path = out / "step_000002.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["config"]["batch_size"] = 2
    common.save_checkpoint(path, checkpoint)
    micro("01_opt_single_gpu", "a", **AS_BEFORE | {"max_steps": 3})
    assert json.loads((out / "run.json").read_text())["config"]["batch_size"] == 2


def test_weights_under_a_wrapper_s_names_are_refused(micro, micro_checkpoint, tmp_path):
    for prefix in ("_orig_mod.", "module."):
        checkpoint = torch.load(micro_checkpoint, weights_only=True)
        checkpoint["model"] = {prefix + name: w for name, w in checkpoint["model"].items()}
        common.save_checkpoint(tmp_path / "wrapped.pt", checkpoint)
        with pytest.raises(common.UserError, match="wrapped.pt does not fit the model"):
            micro("00_orig", "a", init=str(tmp_path / "wrapped.pt"), max_steps=1)


def test_a_bfloat16_run_continues_in_float16_and_says_so(micro, capsys):
    """The loss scale starts anew."""
    out = micro("01_opt_single_gpu", "a", max_steps=2, save_every=2, dtype="bfloat16")
    micro("01_opt_single_gpu", "a", **AS_BEFORE | {"max_steps": 4, "dtype": "float16"})
    assert "note: the run so far had no loss scaling" in capsys.readouterr().out
    assert len(losses(out)) == 4


def test_every_resume_goes_on_as_the_first_run_was_asked_to(micro):
    out = micro("01_opt_single_gpu", "a", max_steps=2, save_every=2, batch_size=2, recompute="mlp")
    config, path = script("01_opt_single_gpu").Config(resume=True), out / "step_000002.pt"
    config.given = {"resume", "preset"}  # --preset auto
    assert run.merge_resumed(config, common.load_checkpoint(path), path).preset == "tiny"
    for steps in (4, 6):
        again = AS_BEFORE | {"max_steps": steps, "dtype": "auto", "compile": "auto"}
        micro("01_opt_single_gpu", "a", **again)
        config = json.loads((out / "run.json").read_text())["config"]
        assert config["batch_size"] == 2 and config["recompute"] == "mlp"
        assert (config["dtype"], config["compile"]) == ("float32", "off")


def test_resume_without_a_folder_takes_the_newest_run_that_learnt(micro, tmp_path):
    good = micro("00_orig", tmp_path / "log" / "00_orig" / "a", max_steps=2, save_every=2)
    failed = good.parent / "b"
    failed.mkdir()
    (failed / "run.json").write_text("{}")
    config = script("00_orig").Config(resume=True)
    assert run.find_run(config, "00_orig", writes=True)[0] == good.relative_to(tmp_path)


def test_a_flag_that_is_given_wins_over_the_run_that_is_resumed_also_with_its_default():
    Config = script("01_opt_single_gpu").Config
    config = run.parse_config(Config, "", ["--resume", "--recompute", "off", "--hellaswag-every=0"])
    assert run.explicit(config) == {"resume": True, "recompute": "off", "hellaswag_every": 0}
    assert run.explicit(Config(keep=3)) == {"keep": 3}
