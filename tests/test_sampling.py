"""sampling_cpu_mps.py and the sampler: texts, layers of the report, each notices a fault."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import common
import pytest
import torch
from conftest import MICRO, ROOT, command, script

import sampling_cpu_mps as sampling

SCRIPT = ROOT / "sampling_cpu_mps.py"
WEIGHTS = common.init_weights(MICRO, seed=7)
LAYERS = ["weights", "logits", "softmax", "probabilities", "sampler_on_device", "sampler_on_cpu",
          "impossible_draws", "texts", "causality"]


def settings(**changed):
    defaults = {"seed": 1, "num_samples": 2, "max_new_tokens": 12, "temperature": 1.0, "top_k": 50}
    return SimpleNamespace(**defaults | changed)


def make_model(bias=None):
    """01's model of shape MICRO; bias {id: logit} sets outputs of the head, padding included."""
    model = script("01_opt_single_gpu").GPT(MICRO).eval()
    common.load_canonical(model, WEIGHTS)
    head, bias = model.lm_head.forward, bias or {}

    def forward(x):
        logits = head(x)
        logits[..., list(bias)] = torch.tensor(list(bias.values()))
        return logits

    model.lm_head.forward = forward
    return model


def continue_(model, idx, n=12, seed=1, **how):
    return common.generate(model, idx, n, torch.Generator().manual_seed(seed), **how)


@pytest.fixture
def variants():
    return sampling.make_variants(WEIGHTS, MICRO)[0]


@pytest.fixture
def prompt():
    return sampling.encode_prompt("The list of names")


# -----------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def finished(tmp_path_factory, micro_checkpoint):
    """One whole run without a network: (process, report)."""
    folder = tmp_path_factory.mktemp("sampling")
    run = command(SCRIPT, "results.json", "--checkpoint", micro_checkpoint, "--device", "cpu",
                  "--prompt", "one<|endoftext|>two", "--max-new-tokens", 8, cwd=folder,
                  http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert run.returncode == 0, run.stderr
    assert [p.name for p in folder.iterdir()] == ["results.json"]

    def not_json(name):
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "results.json").read_text(encoding="utf-8")
    return run, json.loads(text, parse_constant=not_json)


def test_report(finished):
    _, report = finished
    assert [layer["name"] for layer in report["layers"]] == LAYERS
    for layer in report["layers"]:
        order = ["identical", "close", "differs"]
        verdicts = [row["verdict"] for row in layer["rows"]]
        assert layer["verdict"] == max(verdicts, key=order.index) and layer["question"]
        assert all({"variant", "difference", "tolerance"} <= row.keys() for row in layer["rows"])
    assert report["variants"][0] == "cpu float32"
    assert {"cpu float64", "cpu float32, batch 8"} <= set(report["variants"])
    assert report["environment"]["torch"] == torch.__version__
    assert report["tolerances"] == sampling.TOLERANCE
    assert report["settings"]["seed"] == 1337 and report["prompt_tokens"] == 3
    missing = [name for name in ("cuda", "mps") if not getattr(torch, name).is_available()]
    assert set(missing) <= set(report["not_available"])


def test_layers_on_one_cpu(finished):
    """Nothing is lost on the way, CPU draws agree, another place in the stream does not."""
    layers = {layer["name"]: layer for layer in finished[1]["layers"]}
    for name in ("weights", "sampler_on_cpu", "impossible_draws"):
        assert layers[name]["verdict"] == "identical", layers[name]
    for name in ("logits", "softmax", "probabilities", "causality"):
        assert layers[name]["verdict"] in ("identical", "close"), layers[name]
    assert layers["sampler_on_device"]["verdict"] == "differs"
    ahead = [row for row in layers["texts"]["rows"] if row["sampler"] == "cpu, a draw ahead"]
    assert [row["cause"] for row in ahead] == ["sampler"]
    lengths = {row["T"] for row in layers["causality"]["rows"]}
    assert lengths == {1, 4, 5, 63, 64}  # 257 is above the block size of this model


def test_texts_come_first(finished):
    run, report = finished
    assert len(report["texts"]) == 2
    for i, text in enumerate(report["texts"], 1):
        assert f"sample {i}: one<|endoftext|>two{text}" in run.stdout
        assert run.stdout.index(f"sample {i}:") < run.stdout.index("weights: do weights")


def test_help_names_the_separator(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sampling_cpu_mps.py", "--help"])
    monkeypatch.setattr(sampling, "get_tokenizer", None)
    with pytest.raises(SystemExit) as end:
        sampling.main()
    assert end.value.code == 0 and "<|endoftext|>" in capsys.readouterr().out


@pytest.mark.parametrize("flags, named", [
    (["--temperature", "-1"], "--temperature -1"), (["--temperature", "nan"], "nan"),
    (["--temperature", "inf"], "inf"), (["--temperature", "1e-40"], "1e-40"),
    (["--top-k", "0"], "--top-k 0"), (["--num-samples", "0"], "--num-samples 0"),
    (["--max_new_tokens", "0"], "--max-new-tokens 0"), (["--seed", "-1"], "--seed -1"),
    (["."], "is a folder"), (["no/such/folder/results.json"], "cannot be written"),
])
def test_bad_values_before_any_work(flags, named, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sampling_cpu_mps.py", *flags])
    monkeypatch.setattr(sampling, "load", lambda args: pytest.fail("work began"))
    with pytest.raises(common.UserError, match=named):
        sampling.main()
    assert list(tmp_path.iterdir()) == []


def test_bad_value_is_one_line_and_exit_code_2(tmp_path):
    run = command(SCRIPT, "--checkpoint", "missing.pt", "--top-k", 0, cwd=tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.splitlines() == ["sampling_cpu_mps.py: error: --top-k 0: give 1 or more"]


def disk_full(*args):
    raise OSError(28, "No space left")


def test_results_are_kept_until_new_ones_are_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    path.write_text("old")
    common.check_writable(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(common.os, "fsync", disk_full)
    with pytest.raises(common.UserError, match="No space left"):
        common.write_json(path, {"a": 1})
    monkeypatch.undo()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    common.write_json(path, {"a": math.nan, "b": [math.inf]})
    assert json.loads(path.read_text()) == {"a": None, "b": [None]}
    assert list(tmp_path.iterdir()) == [path]


def test_other_vocabulary_is_refused(tmp_path):
    shape = asdict(common.GPTConfig(1, 1, 8, block_size=8, vocab_size=100))
    weights = common.init_weights(common.GPTConfig(**shape), seed=0)
    checkpoint = {"step": 0, "model": weights, "model_config": shape}
    common.save_checkpoint(tmp_path / "other.pt", checkpoint)
    with pytest.raises(common.UserError, match="100 ids.*50257"):
        sampling.load(SimpleNamespace(checkpoint=str(tmp_path / "other.pt"), seed=0))


def test_long_prompt_is_cropped_and_said(variants, capsys):
    idx = sampling.encode_prompt("word " * 100)
    assert idx.size(1) > MICRO.block_size
    texts = sampling.print_texts(variants[0], idx, settings(prompt="word " * 100, top_k=1), "micro")
    assert f"the model sees the last {MICRO.block_size}" in capsys.readouterr().out
    short = continue_(make_model(), idx[:, -MICRO.block_size :], top_k=1)[0, MICRO.block_size :]
    assert texts[0] == common.decode(short)


def test_prompts():
    assert sampling.encode_prompt("").tolist() == [[common.EOT]]
    a, separator, b = sampling.encode_prompt("a<|endoftext|>b")[0].tolist()
    assert separator == common.EOT and common.get_tokenizer().decode([a, b]) == "ab"


# -----------------------------------------------------------------------------
# The sampler


def test_seed(variants, prompt):
    def write(seed):
        return variants[0].write(prompt, sampling.make_generator("cpu", seed), settings())

    assert torch.equal(write(1), write(1))
    assert not torch.equal(write(1), write(2))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    write(3)
    assert torch.equal(torch.get_rng_state(), state)  # it draws from a generator of its own


@pytest.mark.parametrize("how", [{"temperature": 0}, {"top_k": 1}, {"temperature": 0, "top_k": 5}])
def test_greedy_is_argmax(how, prompt):
    model, idx = make_model(), prompt
    with torch.no_grad():
        for _ in range(12):
            idx = torch.cat([idx, model(idx)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(continue_(model, prompt, **how), idx)


def test_batch_row_is_the_single_one(prompt):
    """Greedy, a row does not depend on its neighbours; drawn, the first row's first id does not."""
    other = torch.randint(common.EOT, prompt.shape, generator=torch.Generator().manual_seed(0))
    batch = torch.cat([prompt, other])
    single = [continue_(make_model(), row[None], temperature=0) for row in batch]
    assert torch.equal(continue_(make_model(), batch, temperature=0), torch.cat(single))
    first = [continue_(make_model(), idx, n=1)[:1] for idx in (batch, prompt)]
    assert torch.equal(*first)


def test_top_k_with_ties():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[3.0, 1.0, 3.0, 3.0, 2.0]]).repeat(200, 1)
    assert common.draw(logits, generator, top_k=1).unique().tolist() == [0]  # greedy's choice
    assert common.draw(logits, generator, top_k=2).unique().tolist() == [0, 2, 3]  # all that tie
    assert common.draw(logits, generator, top_k=4).unique().tolist() == [0, 2, 3, 4]
    assert common.draw(logits, generator, top_k=100).max() < 5


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 1e30])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[-100.0, 90.0, 100.0, -math.inf]]).repeat(500, 1)
    ids = common.draw(logits, torch.Generator().manual_seed(0), temperature, top_k=3)
    assert ids.unique().tolist() == ([0, 1, 2] if temperature > 1 else [2])


def test_exact_zeros_are_never_drawn():
    (row,) = sampling.impossible_rows([torch.device("cpu")], seed=0)
    assert row["draws"] == 20000 and row["difference"] == 0 and row["verdict"] == "identical"


@pytest.mark.parametrize("how", [{"temperature": 0}, {"top_k": 10}, {}])
def test_padding_is_never_sampled(how):
    model = make_model({50257: 100.0, 50300: 100.0})  # outputs of the head that no token has
    ids = continue_(model, torch.full((4, 1), common.EOT), n=6, **how)
    assert ids.max() < common.VOCAB_SIZE


def test_separator_ends_a_row(variants, prompt, monkeypatch):
    model = make_model({common.EOT: 100.0})
    ids = continue_(model, prompt, temperature=0)
    assert ids[0, prompt.size(1) :].tolist() == [common.EOT] * 12
    drawn = iter([[[5], [6]], [[common.EOT], [7]], [[8], [9]]])
    monkeypatch.setattr(common, "draw", lambda *a: torch.tensor(next(drawn)))
    ids = variants[0].write(prompt, torch.Generator(), settings(max_new_tokens=3))
    ids = ids[:, prompt.size(1) :]
    assert ids.tolist() == [[5, common.EOT, common.EOT], [6, 7, 9]]
    assert common.decode(ids[0]) == common.get_tokenizer().decode([5])


# -----------------------------------------------------------------------------
# The comparison


def test_first_divergence():
    assert sampling.first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert sampling.first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert sampling.first_divergence([4, 2], [1, 2]) == 0
    assert sampling.first_divergence([1, 2], [1, 2, 3]) == 2
    assert sampling.first_divergence([], []) is None


@pytest.mark.parametrize("difference, verdict", [
    (0, "identical"), (0.0, "identical"), (1e-9, "close"), (0.5, "close"), (1.5, "differs"),
    (math.nan, "differs"), (math.inf, "differs")])
def test_verdicts(difference, verdict):
    assert sampling.row("x", difference, 1.0)["verdict"] == verdict


def test_texts_part_at_the_first_sample_that_does(variants):
    cpu = variants[0]
    reference = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 9]])
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 9]])

    def compare(variant, sampler):
        return sampling.compare_texts(cpu, variant, reference, ids, 1, sampler)

    row = compare(cpu, "cpu")
    assert (row["shared"], row["sample"], row["logit_difference"]) == (1, 2, 0.0)
    assert row["difference"] == 2
    assert row["cause"] == "rounding" and row["verdict"] == "differs"
    assert compare(cpu, "cuda")["cause"] == "sampler"
    assert compare(sampling.Variant(make_model({5: 100.0})), "cpu")["cause"] == "logits"
    same = sampling.compare_texts(cpu, cpu, ids, ids, 1, "cpu")
    assert (same["shared"], same["sample"]) == (3, None)
    assert (same["cause"], same["verdict"]) == (None, "identical")



def leak_in_groups_of_four(q, k, v, dropout_p=0.0, is_causal=False):
    """The mask applied once for four queries: each sees as far as the last of its group."""
    last = torch.arange(q.size(-2)) // 4 * 4 + 3
    mask = torch.arange(k.size(-2)) <= last[:, None]
    return torch.nn.functional.softmax(
        (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(~mask, -math.inf), dim=-1) @ v


def test_causality_finds_a_leak(variants, monkeypatch):
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", leak_in_groups_of_four)
    rows = sampling.causality_rows(variants, seed=0)
    verdicts = {(row["variant"], row["T"]): row["verdict"] for row in rows}
    for variant in ("cpu float32", "cpu float64", "cpu bfloat16"):
        leaks = [T for T in (1, 4, 5, 63, 64) if verdicts[variant, T] == "differs"]
        assert leaks == [4, 63, 64]  # the last token is alone in its group for 1 and 5


def test_causality_finds_values_that_are_wrong_but_causal(variants):
    variants[1].register_forward_hook(lambda module, inputs, output: output * 1.5)
    rows = sampling.causality_rows(variants[:2], seed=0)
    assert {row["verdict"] for row in rows if row["variant"] == variants[1].name} == {"differs"}


def layers_of(variants, prompt, **changed):
    layers = sampling.make_layers(variants, prompt, WEIGHTS, settings(**changed))
    return {layer["name"]: layer["verdict"] for layer in layers}, sampling.answer(layers)


def quick(monkeypatch):
    monkeypatch.setattr(sampling, "ZERO_DRAWS", 500)
    monkeypatch.setattr(sampling, "LENGTHS", (4,))


def test_layers_notice_changed_weights_and_logits(variants, prompt, monkeypatch):
    quick(monkeypatch)
    double = next(v for v in variants if v.dtype == "float64")
    with torch.no_grad():
        double.model.h[0].mlp.c_proj.weight *= 100
    verdicts, _ = layers_of(variants, prompt)
    for name in ("weights", "logits", "probabilities", "texts", "causality"):
        assert verdicts[name] == "differs"
    assert verdicts["softmax"] != "differs" and verdicts["sampler_on_cpu"] == "identical"


def test_layers_notice_another_sampler(variants, prompt, monkeypatch):
    quick(monkeypatch)
    always_one = lambda p, n, generator: torch.ones(len(p), n, dtype=torch.long)
    monkeypatch.setattr(torch, "multinomial", always_one)
    verdicts, _ = layers_of(variants, prompt)
    assert verdicts["impossible_draws"] == "differs"  # id 1 has probability 0 there
    assert verdicts["weights"] == "identical"


def test_layers_notice_a_wrong_softmax(variants, prompt, monkeypatch):
    quick(monkeypatch)
    softmax = torch.Tensor.softmax
    fault = {torch.float32: 1.01, torch.float64: 1.0}
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, dim: softmax(x, dim) * fault[x.dtype])
    assert layers_of(variants, prompt)[0]["softmax"] == "differs"


def test_without_chance_only_logits_part_texts(variants, prompt, monkeypatch):
    quick(monkeypatch)
    exact = [v for v in variants if v.dtype in ("float32", "float64")]
    verdicts, answer = layers_of(exact, prompt, temperature=0)
    assert verdicts["texts"] == "identical"
    assert answer == f"of {len(exact)} other runs: {len(exact)} same text"


def test_variants_differ_only_in_how_they_compute(variants, prompt):
    """Each is the same model within its tolerance, and leaves threads and weights alone."""
    threads, reference = torch.get_num_threads(), variants[0].logits(prompt)
    for v in variants[1:]:
        assert sampling.relative(v.logits(prompt), reference) <= sampling.TOLERANCE[v.dtype]
        assert v.logits(prompt).dtype == getattr(torch, v.dtype)
    assert torch.get_num_threads() == threads
    assert len({v.name for v in variants}) == len(variants)
