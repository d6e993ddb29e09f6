"""check_numerics.py: it passes as a command, and every check fails when its subject is broken."""

import ctypes
import importlib
import json
import re
import sys
import types

import pytest
import torch
from conftest import ROOT, command

import check_numerics
import common
import run

CPU = torch.device("cpu")


def broken(name, *changes):
    """Script name as a module of its own, in which each (old, new) of changes is replaced."""
    path = ROOT / f"{name}.py"
    source = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in source, f"{name}.py no longer holds {old!r}"
        source = source.replace(old, new)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(source, path, "exec"), module.__dict__)
    return module


SCRIPTS = {"orig": "00_orig", "single": "01_opt_single_gpu", "multi": "02_opt_multi_gpu_ddp"}
SCALE = (" / math.sqrt(k.size(-1))", "")
ALWAYS = ("dropout_p=self.dropout if self.training else 0.0", "dropout_p=self.dropout")
UNCUT = ("[..., : self.config.vocab_size]", "")
SUMMED = ("targets.flatten())", "targets.flatten(), reduction='sum')")
UNTIED = ("self.lm_head.weight = self.wte.weight", "pass")
IN_SCRIPTS = [  # check, script, what is there, what it becomes
    ("merged_qkv", "single", "q, k, v = self.c_attn(x)", "k, q, v = self.c_attn(x)"),
    ("sdpa", "orig", *SCALE),
    ("sdpa", "single", "is_causal=True", "is_causal=True, scale=1.0"),
    ("causality", "orig", ".triu(1)", ".triu(2)"),
    ("causality", "single", "is_causal=True", "is_causal=False"),
    ("online_softmax", "orig", *SCALE),
    ("eval_dropout", "orig", *ALWAYS),
    ("eval_dropout", "single", *ALWAYS),
    ("native_ops", "orig", "unbiased=False", "unbiased=True"),
    ("native_ops", "single", "eps=1e-5", "eps=1e-6"),
    ("native_ops", "single", 'approximate="tanh"', 'approximate="none"'),
    ("same_gradients", "multi", "x = x + self.mlp(self.ln_2(x))",
     "x = x + 0.99 * self.mlp(self.ln_2(x))"),
    ("same_training", "single", "loss = model(x, y) / grad_accum_steps", "loss = model(x, y)"),
    ("same_training", "multi", '"weight_decay": weight_decay', '"weight_decay": 0.0'),
    ("padded_vocabulary", "single", *UNCUT),
    ("pad_rows", "single", *UNCUT),
    ("bfloat16", "single", "GPT(run.model_config).to(device)",
     "GPT(run.model_config).to(device, torch.bfloat16)"),
    ("loss_scaling", "single", "        scaler.unscale_(optimizer)", "        pass"),
    ("fused_adamw", "single", '"weight_decay": 0.0', '"weight_decay": weight_decay'),
    ("schedule", "single", "(step + 1) / config.warmup_steps", "step / config.warmup_steps"),
    ("compile_graphs", "single", "    model.train()\n", ""),
    ("micro_batch", "single", *SUMMED),
    ("recomputation", "single", "use_reentrant=False",
     "use_reentrant=False, preserve_rng_state=False"),
    ("recomputation", "single", "for part in parts[config.recompute]", "for part in []"),
    ("own_generators", "single", "    model.eval()\n", ""),
    ("flops", "orig", "logits = self.lm_head(self.ln_f(x))",
     "logits = self.lm_head(x) + self.lm_head(self.ln_f(x))"),
    ("parameters_and_bytes", "orig", *UNTIED),
]


def fails(name):
    """Whether the check fails in process by what it measured, not by an error of the test."""
    result = check_numerics.CHECKS[name].run(CPU)
    assert not result["skipped"] and result["note"] == "", result["note"]
    return result["passed"] is False


@pytest.mark.parametrize("name, script, old, new", IN_SCRIPTS,
                         ids=[f"{c[0]}-{c[2].strip()}" for c in IN_SCRIPTS])
def test_fails_when_a_script_is_broken(monkeypatch, name, script, old, new):
    monkeypatch.setattr(check_numerics, script, broken(SCRIPTS[script], (old, new)))
    assert fails(name)


def swapped(batches, *_):
    first = next(batches)
    yield next(batches)
    yield first
    yield from batches


def same_for_all_ranks(sampler):
    for step in range(10**6):
        parts = sampler.update(step).reshape(-1, sampler.world_size, sampler.batch_size)
        yield from parts[:, 0].tolist()


def let_memory_go():
    for parameter in (-1, -3):  # glibc's defaults
        ctypes.CDLL("libc.so.6").mallopt(parameter, 2**17)


real_init_weights, real_to_canonical = common.init_weights, common.to_canonical
ELSEWHERE = [  # check, module, attribute, what it becomes
    ("number_formats", check_numerics, "round_tf32", lambda x: x.bfloat16().float()),
    ("tf32", check_numerics, "round_tf32", lambda x: x),
    ("lost_updates", torch.optim, "AdamW", lambda p, lr, weight_decay: torch.optim.SGD(p, lr=1e-6)),
    ("loss_scaling", torch.amp.GradScaler, "_maybe_opt_step",
     lambda self, optimizer, state: optimizer.step()),
    ("fused_adamw", torch, "_fused_adamw_", torch._fused_adam_),
    ("pinned_memory", common, "prefetch", swapped),
    ("compile", torch, "compile", lambda model, **_: lambda *args: 1.01 * model(*args)),
    ("memory_reuse", check_numerics, "keep_freed_memory", let_memory_go),
    ("rank_parts", common.UpdateSampler, "__iter__", same_for_all_ranks),
    ("rank_parts", check_numerics, "eval_batches",
     lambda n, B, rank, world_size: common.eval_batches(n, B)),
    ("rank_parts", check_numerics, "mix_seeds", lambda seed, step, rank: seed),
    ("checkpoint_keys", check_numerics, "load_canonical", lambda model, weights: None),
    ("seeds", torch, "manual_seed", lambda seed: None),
    ("own_generators", common, "draw", lambda logits, *_: torch.multinomial(logits.softmax(-1), 1)),
    ("addition_order", torch, "add", lambda a, b: a.double() + b.double()),
    ("first_loss", check_numerics, "init_weights",
     lambda config, seed: {name: 20 * w for name, w in real_init_weights(config, seed).items()}),
    ("flops", run, "flops_per_token", lambda config, T: 6 * 124e6),
]


@pytest.mark.parametrize("name, module, attribute, value", ELSEWHERE,
                         ids=[f"{c[0]}-{c[2]}" for c in ELSEWHERE])
def test_fails_when_what_it_stands_on_is_broken(monkeypatch, name, module, attribute, value):
    if name == "memory_reuse" and sys.platform != "linux":
        pytest.skip("glibc alone")
    monkeypatch.setattr(module, attribute, value)
    assert fails(name)


def broken_on_rank(rank, world_size, folder):
    """on_rank where nothing is added up, and 02 reduces nothing and writes on every rank."""
    all_reduce = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda t, *args, **kwargs: (
        t.numel() > 1 and all_reduce(t, *args, **kwargs))
    check_numerics.multi = broken(SCRIPTS["multi"], ("dist.all_reduce(total)", "pass"),
                                  ("reuse_memory=True, **share)", "world_size=world_size)"),
                                  ("= micro_step == grad_accum_steps - 1", "= False"))
    check_numerics.DistributedDataParallel = lambda model, **_: model
    check_numerics.on_rank(rank, world_size, folder)


class AlwaysExchanging(torch.nn.parallel.DistributedDataParallel):
    require_backward_grad_sync = property(lambda self: True, lambda self, value: None)


def exchanging_on_rank(rank, world_size, folder):
    """on_rank in which every micro-step exchanges gradients."""
    check_numerics.DistributedDataParallel = AlwaysExchanging
    check_numerics.on_rank(rank, world_size, folder)


IN_PROCESSES = ["process_group", "ddp_gradients", "reduced_metrics", "one_writer"]


@pytest.mark.parametrize("on_rank, names", [(broken_on_rank, IN_PROCESSES),
                                            (exchanging_on_rank, ["ddp_gradients"])],
                         ids=["nothing-shared", "always-exchanging"])
def test_fails_when_processes_are_broken(monkeypatch, on_rank, names):
    monkeypatch.setattr(check_numerics, "on_rank", on_rank)
    check_numerics.two_ranks.cache_clear()
    try:
        assert all(fails(name) for name in names)
    finally:
        check_numerics.two_ranks.cache_clear()


def test_every_check_was_seen_to_fail():
    seen = {case[0] for case in IN_SCRIPTS + ELSEWHERE} | set(IN_PROCESSES)
    assert seen == set(check_numerics.CHECKS)


def test_an_error_fails_a_check(monkeypatch):
    monkeypatch.delattr(check_numerics, "round_tf32")
    result = check_numerics.CHECKS["tf32"].run(CPU)
    assert result["passed"] is False and result["note"].startswith("NameError: ")


def test_a_nan_fails_a_check():
    measure = lambda device: [("loss", float("nan"), "<=", 1.0)]
    check = check_numerics.Check("nan", None, "?", ("cpu",), measure)
    result = check.run(CPU)
    assert result["passed"] is False
    assert json.loads(json.dumps(result, allow_nan=False))["measured"] == {"loss": "nan"}


def test_a_nan_hides_behind_no_other_number():
    zero, nan = torch.zeros(1), torch.full((1,), float("nan"))
    assert check_numerics.difference([zero, nan], [zero, zero]) != 0
    assert check_numerics.relative({"a": zero + 1, "b": nan}, {"a": zero + 1, "b": zero + 1}) != 0
    assert check_numerics.apart(([1.0, float("nan")],), ([1.0, 1.0],)) != 0


def test_a_check_that_measures_nothing_fails():
    check = check_numerics.Check("empty", None, "?", ("cpu",), lambda device: [])
    assert check.run(CPU)["passed"] is False


def test_what_makes_no_sense_on_a_device_is_skipped_with_a_reason():
    result = check_numerics.CHECKS["ddp_gradients"].run(torch.device("mps"))
    assert result["skipped"] and result["passed"] is None and "cpu only" in result["note"]


def test_every_optimisation_has_a_check():
    docstrings = [importlib.import_module(SCRIPTS[name]).__doc__ for name in ("single", "multi")]
    lines = [line for doc in docstrings for line in doc.splitlines() if line.startswith("[")]
    numbers = {int(number) for line in lines for number in re.findall(r"\[(\d+)\]", line)}
    assert numbers == set(range(1, max(numbers) + 1))
    assert {check.optimisation for check in check_numerics.CHECKS.values()} - {None} == numbers


def test_all_checks_pass_as_a_command(tmp_path):
    done = command(ROOT / "check_numerics.py", "results.json", cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["passed"] is True and results["environment"]["device"] == "cpu"
    assert [check["name"] for check in results["checks"]] == list(check_numerics.CHECKS)
    for check in results["checks"]:
        assert set(check) == {"name", "optimisation", "question", "measured", "tolerance",
                              "passed", "skipped", "note", "seconds"}
        assert check["question"].endswith("?") and check["question"] in done.stdout
        assert check["measured"].keys() == check["tolerance"].keys() and check["seconds"] >= 0
        assert check["skipped"] or (check["passed"] and check["measured"])
        if check["skipped"]:
            assert check["name"] == "compile" and check["note"]


def test_only(tmp_path):
    done = command(ROOT / "check_numerics.py", "some.json", "--only", "schedule", "seeds",
                   cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert [check["name"] for check in results["checks"]] == ["schedule", "seeds"]
    assert "2 passed, 0 failed, 0 skipped" in done.stdout


def main(capsys, *args):
    """(exit code, stdout, stderr) of check_numerics with args, in process."""
    with pytest.raises(SystemExit) as stop:
        common.run_cli(check_numerics.main, list(map(str, args)))
    return stop.value.code, *capsys.readouterr()


def test_exit_code_1_when_a_check_fails(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check_numerics, "orig", broken(SCRIPTS["orig"], SCALE))
    code, out, _ = main(capsys, tmp_path / "r.json", "--only", "sdpa", "seeds")
    assert code == 1 and "failed: sdpa" in out and "FAIL" in out
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["passed"] is False


@pytest.mark.parametrize("args, words", [
    (["{}/r.json", "--only", "schedule", "sdpaa"], ["sdpaa", "no such check", "sdpa,"]),
    (["{}", "--only", "schedule"], ["is a folder"]),
    (["{}/none/r.json", "--only", "schedule"], ["cannot be written"]),
    (["{}/r.json", "--device", "mps", "--only", "schedule"], ["--device mps", "not available"]),
])
def test_bad_arguments_are_one_line_and_nothing_runs(capsys, tmp_path, args, words):
    if "mps" in args and torch.backends.mps.is_available():
        pytest.skip("MPS is available")
    code, out, error = main(capsys, *(arg.format(tmp_path) for arg in args))
    assert code == 2 and out == "" and error.count("\n") == 1
    assert all(word in error for word in words)
    assert list(tmp_path.iterdir()) == []
