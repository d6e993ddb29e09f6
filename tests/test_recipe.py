"""One recipe: 00, 01 and 02 learn the same from the same tokens, however they compute."""

import math

import pytest
import torch
from conftest import MICRO, SCRIPTS, final_weights, largest_difference, losses, read_jsonl, script

import common


def assert_same(a, b, tolerance):
    assert len(a) == len(b) > 0
    assert max(abs(x - y) for x, y in zip(a, b)) < tolerance


REFERENCE = []  # 20 losses of 00, run once


@pytest.fixture
def reference(micro):
    if not REFERENCE:
        REFERENCE.extend(losses(micro("00_orig", "reference", max_steps=20, batch_size=4)))
    return REFERENCE


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_losses_of_01_are_those_of_00_for_every_micro_batch(micro, reference, batch_size):
    assert len(set(reference)) == 20
    out = micro("01_opt_single_gpu", "a", max_steps=20, batch_size=batch_size)
    assert_same(losses(out), reference, 1e-4)


def test_losses_of_02_in_one_process_are_those_of_00(micro, reference):
    assert_same(losses(micro("02_opt_multi_gpu_ddp", "a", max_steps=20)), reference, 1e-4)


def test_compiled_losses_are_those_of_00(micro, reference):
    out = micro("01_opt_single_gpu", "a", max_steps=20, compile="default")
    assert_same(losses(out), reference, 1e-4)


def test_bfloat16_losses_are_near_those_of_00(micro, reference):
    found = losses(micro("01_opt_single_gpu", "a", max_steps=20, dtype="bfloat16"))
    assert_same(found, reference, 2e-2)
    assert found != reference


@pytest.mark.parametrize("recompute", ["mlp", "block"])
def test_recomputation_changes_nothing(micro, recompute):
    plain = micro("01_opt_single_gpu", "a", dropout=0.2)
    out = micro("01_opt_single_gpu", "b", dropout=0.2, recompute=recompute)
    assert losses(out) == losses(plain)


def test_float16_trains_with_loss_scaling(micro):
    settings = dict(max_steps=3, total_batch_size=128, block_size=32)
    out = micro("01_opt_single_gpu", "a", dtype="float16", **settings)
    plain = micro("01_opt_single_gpu", "b", dtype="float32", **settings)
    assert_same(losses(out), losses(plain), 2e-2)
    assert common.load_checkpoint(out / "step_000003.pt")["optimizer"]["step"] == 3


@pytest.mark.parametrize("name", SCRIPTS[:2])
def test_evaluation_sampling_and_saving_change_nothing_that_is_learnt(micro, name):
    quiet = micro(name, "quiet", dropout=0.1)
    busy = micro(name, "busy", dropout=0.1, eval_every=1, sample_every=2, save_every=1,
                 val_tokens=128)
    assert losses(busy) == losses(quiet)
    assert largest_difference(final_weights(busy), final_weights(quiet)) == 0


def test_seed_decides_weights_and_order_alone(micro):
    a, b, c = (losses(micro("00_orig", out, seed=seed))
               for out, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert a == b
    assert all(x != y for x, y in zip(a, c))


@pytest.mark.parametrize("name", SCRIPTS)
def test_first_loss_is_that_of_a_uniform_guess(name):
    model = script(name).GPT(MICRO)
    common.load_canonical(model, common.init_weights(MICRO, seed=1337))
    idx = torch.randint(common.VOCAB_SIZE, (4, 65), generator=torch.Generator().manual_seed(0))
    loss = model(idx[:, :-1], idx[:, 1:])
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(50257)) < 0.3


def test_initial_weights_are_those_of_gpt2():
    config = common.GPTConfig(n_layer=8, n_head=2, n_embd=64, block_size=32)
    weights = common.init_weights(config, seed=0)
    assert weights["wte.weight"].std().item() == pytest.approx(0.02, rel=0.01)
    assert weights["h.3.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert weights["h.3.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert weights["h.3.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["h.3.attn.c_attn.bias"].abs().max() == 0 and weights["ln_f.weight"].min() == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_dropout_acts_in_training_only(name):
    model = script(name).GPT(common.GPTConfig(2, 2, 32, 64, dropout=0.5))
    common.load_canonical(model, common.init_weights(MICRO, seed=0))
    idx = torch.arange(40).view(1, 40)
    plain = script(name).GPT(MICRO)
    common.load_canonical(plain, common.init_weights(MICRO, seed=0))
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    assert torch.equal(model(idx), model(idx))
    assert torch.equal(model(idx), plain(idx))


def test_validation_loss_is_the_same_for_every_batch_size(micro):
    found = []
    for batch_size in (1, 2, 4):
        out = micro("00_orig", f"b{batch_size}", max_steps=1, batch_size=batch_size,
                    eval_every=1, val_tokens=7 * 64)
        found.append([row for row in read_jsonl(out / "metrics.jsonl") if "val_loss" in row][0])
    assert {row["val_tokens"] for row in found} == {448}
    assert max(row["val_loss"] for row in found) - min(row["val_loss"] for row in found) < 1e-5


def test_learning_rate_warms_up_from_above_zero_and_ends_at_the_minimum(micro):
    out = micro("00_orig", "a", max_steps=20, warmup_steps=4, learning_rate=1e-3, min_lr=1e-4)
    rates = [row["lr"] for row in read_jsonl(out / "metrics.jsonl") if "lr" in row]
    assert rates[:5] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert all(a > b for a, b in zip(rates[4:], rates[5:]))
    config = script("00_orig").Config(max_steps=20, warmup_steps=4, learning_rate=1e-3,
                                      min_lr=1e-4)
    assert script("00_orig").get_lr(20, config) == pytest.approx(1e-4)


def test_every_update_is_clipped_and_decays_matrices_only(micro, monkeypatch):
    module, seen, rates = script("00_orig"), [], []
    step = torch.optim.AdamW.step

    def spy(optimizer, *args, **kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])).item())
        for group in optimizer.param_groups:
            rates.append(group["lr"])
            assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    out = micro("00_orig", "a", max_steps=8, grad_clip=0.25)
    logged = [row["lr"] for row in read_jsonl(out / "metrics.jsonl") if "lr" in row]
    assert rates[::2] == rates[1::2] == logged and len(set(logged)) > 5
    assert len(seen) == 8 and max(seen) <= 0.25 + 1e-5
    assert sum(len(g["params"]) for g in module.parameter_groups(module.GPT(MICRO), 0.1)) == len(
        list(module.GPT(MICRO).parameters()))


@pytest.mark.parametrize("recompute", ["off", "mlp", "block"])
def test_the_compiled_model_is_one_graph(micro, monkeypatch, recompute):
    """With autocast and recomputation around it: a break would raise."""
    compile = torch.compile
    whole = lambda model, **settings: compile(model, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", whole)
    settings = dict(compile="default", dtype="bfloat16", recompute=recompute)
    assert len(losses(micro("01_opt_single_gpu", "a", max_steps=2, **settings))) == 2
