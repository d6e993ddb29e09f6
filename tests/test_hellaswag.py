"""hellaswag.py: data, mask, scores against an independent scorer, ranks, and the command."""

import http.server
import json
import threading

import common
import pytest
import torch
import torch.multiprocessing as mp
from conftest import MICRO, command, read_jsonl, script

import hellaswag

CPU = torch.device("cpu")
WORDS = ("the a man woman dog is are runs slowly then into water, and holds ball board kitchen . "
         "snow quickly é").split()
GOOD = {"ctx": "A man sits. he", "label": 1,
        "endings": ["runs away.", "sleeps.", "eats a cake.", "is gone."]}


def make_items(n, seed=5, longest=12):
    """n items of random words, of many lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(most):
        length = int(torch.randint(1, most + 1, (1,), generator=generator))
        words = torch.randint(0, len(WORDS), (length,), generator=generator)
        return " ".join(WORDS[i] for i in words)

    return [{"ctx": text(2 * longest), "endings": [text(longest) for _ in range(4)], "label": i % 4}
            for i in range(n)]


def write_items(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def make_model(name="01_opt_single_gpu", scale=8):
    """A random model whose losses differ clearly between endings."""
    model = script(name).GPT(MICRO)
    weights = common.init_weights(MICRO, 7)
    common.load_canonical(model, weights | {"wte.weight": weights["wte.weight"] * scale})
    return model


def score(model, items, batch_size, share=True):
    share = share and hellaswag.can_share(model.eval(), CPU)
    rows, _ = hellaswag.make_rows(items, MICRO.block_size, share)
    return hellaswag.score(model, CPU, rows, batch_size), rows


# Data


@pytest.mark.parametrize("line, message", [
    (b"{", "not a JSON object"), (b"3", "not a JSON object"), (b'"ab"', "not a JSON object"),
    (b"[" * 100000, "not a JSON object"), (b"\xff\xfe", "not UTF-8"),
    ({"ctx": None}, "'ctx' .* null"), ({"ctx": " "}, "'ctx'"), ({"ctx": ["a"]}, "'ctx'"),
    ({"endings": ["a", "b", "c"]}, "'endings' must be 4 texts"), ({"endings": "abcd"}, "'endings'"),
    ({"endings": ["a", "b", "c", ""]}, "'endings'"), ({"endings": ["a", "b", "c", 4]}, "'endings'"),
    ({"label": 4}, "'label' .* 4"), ({"label": -1}, "'label'"), ({"label": ""}, "'label'"),
    ({"label": True}, "'label'"), ({"label": 1.0}, "'label'"), ({"label": None}, "'label'")])
def test_malformed_line(line, message, tmp_path):
    line = json.dumps(GOOD | line).encode() if isinstance(line, dict) else line
    path = tmp_path / "items.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(common.UserError, match=rf"items\.jsonl, line 3: .*{message}"):
        hellaswag.load_examples(path)


@pytest.mark.parametrize("field", ["ctx", "endings", "label"])
def test_missing_field(field, tmp_path):
    path = write_items(tmp_path / "a.jsonl", [{k: v for k, v in GOOD.items() if k != field}])
    with pytest.raises(common.UserError, match=f"line 1: field '{field}' .* missing"):
        hellaswag.load_examples(path)


def test_file_missing_or_empty(tmp_path):
    with pytest.raises(common.UserError, match="nowhere.jsonl: No such file"):
        hellaswag.load_examples(tmp_path / "nowhere.jsonl")
    with pytest.raises(common.UserError, match="holds no examples"):
        hellaswag.load_examples(write_items(tmp_path / "empty.jsonl", []))


def test_labels_line_ends_and_separators(tmp_path):
    item = GOOD | {"label": "2", "ctx": "line\u2028separator"}
    path = tmp_path / "a.jsonl"
    first = json.dumps(item, ensure_ascii=False).encode()
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\r\n\r\n" + json.dumps(GOOD).encode())
    assert [e["label"] for e in hellaswag.load_examples(path)] == [2, 1]
    assert hellaswag.load_examples(path)[0]["ctx"] == "line\u2028separator"


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A local server in place of GitHub; hits are what was asked of it, pages what it has."""
    hits, pages = [], {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            hits.append(self.path)
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    monkeypatch.setattr(hellaswag, "URL", f"http://127.0.0.1:{httpd.server_port}/{{}}.jsonl")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield hits, pages
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_download_is_made_once(server, tmp_path):
    hits, pages = server
    pages["/val.jsonl"] = json.dumps(GOOD).encode()
    threads = [threading.Thread(target=hellaswag.load_examples) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hellaswag.load_examples() == [GOOD] and hits == ["/val.jsonl"]
    assert (tmp_path / "hellaswag" / "hellaswag_val.jsonl").read_bytes() == pages["/val.jsonl"]


@pytest.mark.parametrize("body, message", [
    (None, "fetch it elsewhere and save it as hellaswag"), (b'{"ctx": "cut sh', "line 1")])
def test_failed_download_leaves_no_file(body, message, server, tmp_path):
    server[1]["/val.jsonl"] = body
    with pytest.raises(common.UserError, match=message):
        hellaswag.load_examples()
    assert not (tmp_path / "hellaswag").exists()


# Scores


def test_a_row_predicts_the_tokens_of_its_endings_alone():
    tokenizer = common.get_tokenizer()
    context = tokenizer.encode_ordinary(GOOD["ctx"])
    endings = [tokenizer.encode_ordinary(" " + ending) for ending in GOOD["endings"]]
    assert hellaswag.make_rows([GOOD], 64) == ([(context, endings)], 0)
    assert hellaswag.make_rows([GOOD], 64, share=False) == ([(context, [e]) for e in endings], 0)
    assert tokenizer.decode(context + endings[2]) == GOOD["ctx"] + " " + GOOD["endings"][2]
    for rows in ([(context, endings)], [(context, [e]) for e in endings]):
        idx, positions, branches, places, targets = hellaswag.collate(rows)
        assert targets.tolist() == sum(endings, [])
        row, place = places // idx.size(1), places % idx.size(1)
        before = [(idx[r, p], positions[r, p]) for r, p in zip(row.tolist(), place.tolist())]
        sequences = [(context + ending, i) for ending in endings
                     for i in range(len(context) - 1, len(context) + len(ending) - 1)]
        assert before == [(ids[i], i) for ids, i in sequences]


def test_endings_of_a_row_see_their_context_and_themselves():
    """A change of one ending changes no loss of another, and none of its own before it."""
    model, context = make_model().eval(), [5, 6, 7]
    before = hellaswag.token_losses(model, CPU, [(context, [[8, 9, 10], [11, 12], [13, 14, 15]])])
    after = hellaswag.token_losses(model, CPU, [(context, [[8, 9, 10], [99, 12], [13, 14, 15]])])
    assert (before != after).tolist() == [False] * 3 + [True] * 2 + [False] * 3
    after = hellaswag.token_losses(model, CPU, [(context, [[8, 9, 99], [11, 12], [13, 14, 15]])])
    assert (before != after).tolist() == [False] * 2 + [True] + [False] * 5
    after = hellaswag.token_losses(model, CPU, [([99, 6, 7], [[8, 9, 10], [11, 12]])])
    assert (before[:5] != after).all()


@pytest.mark.parametrize("name, shared", [("00_orig", False), ("01_opt_single_gpu", True),
                                          ("02_opt_multi_gpu_ddp", True)])
def test_contexts_are_shared_where_attention_is_sdpa(name, shared):
    model, items = make_model(name), make_items(8)
    assert hellaswag.can_share(model.eval(), CPU) is shared
    losses, rows = score(model, items, 3)
    apart, four_rows = score(model, items, 3, share=False)
    assert len(four_rows) == 32 and len(rows) == (8 if shared else 32)
    assert (losses - apart).abs().max() < 1e-3 and losses.std() > 1
    ids = torch.randint(0, 50257, (2, 16))  # the model is left as it was
    again = make_model(name).eval()
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))


class Table(torch.nn.Module):
    """The log-probability of the next token is -cost[token], apart from a constant."""

    def __init__(self, cost):
        super().__init__()
        self.config = MICRO
        self.logits = torch.full((common.VOCAB_SIZE,), -30.0)
        for token, value in cost.items():
            self.logits[token] = -value

    def forward(self, idx):
        return self.logits.expand(*idx.shape, -1)


def test_acc_and_acc_norm_disagree():
    """Three dogs have a larger sum than the cat, but a smaller mean; only acc_norm takes them."""
    tokens = [common.get_tokenizer().encode_ordinary(f" {word}")
              for word in ("dog", "cat", "cow", "bird")]
    model = Table({token: cost for (token,), cost in zip(tokens, (1.0, 2.0, 9.0, 0.0))})
    item = {"ctx": "A", "endings": ["dog dog dog", "cat", "cow", "cow cow"], "label": 0}
    items = [item, item, item | {"label": 1}, item | {"label": 3}]
    result = hellaswag.evaluate(model, CPU, items)
    assert result == {"hellaswag_acc_norm": 0.5, "hellaswag_acc": 0.25, "hellaswag_examples": 4}
    losses, _ = score(model, [item], 3)
    norm = model.logits.logsumexp(0).item()
    expected = [3 * (1 + norm), 2 + norm, 9 + norm, 2 * (9 + norm)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["00_orig", "01_opt_single_gpu", "02_opt_multi_gpu_ddp"])
def test_losses_are_those_of_transformers(name, tmp_path):
    """transformers' model and mean loss, one ending at a time, the context labelled -100."""
    transformers = pytest.importorskip("transformers")
    import hf_weights

    model, items = make_model(name), make_items(12)
    hf_weights.export(common.to_canonical(dict(model.named_parameters())), MICRO, tmp_path / "hf")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    tokenizer = common.get_tokenizer()
    expected, means = torch.zeros(48), torch.zeros(48)
    pairs = [(item, ending) for item in items for ending in item["endings"]]
    for i, (item, ending) in enumerate(pairs):
        ctx, end = tokenizer.encode_ordinary(item["ctx"]), tokenizer.encode_ordinary(" " + ending)
        with torch.no_grad():
            labels = torch.tensor([[-100] * len(ctx) + end])
            means[i] = theirs(torch.tensor([ctx + end]), labels=labels).loss
        expected[i] = means[i] * len(end)
    losses, rows = score(model, items, 7)
    assert (losses - expected).abs().max() < 2e-3 and expected.std() > 1
    labels = torch.tensor([item["label"] for item in items])
    result = hellaswag.evaluate(model, CPU, items)
    for key, values in (("hellaswag_acc", expected), ("hellaswag_acc_norm", means)):
        assert result[key] == (values.view(-1, 4).argmin(1) == labels).double().mean().item()


def test_batch_size_and_order_change_nothing():
    model, items = make_model(), make_items(20)
    losses, rows = score(model, items, 1)
    for batch_size in (7, 64):
        others, _ = score(model, items, batch_size)
        assert (losses - others).abs().max() < 1e-3
        assert torch.equal(losses.view(-1, 4).argmin(1), others.view(-1, 4).argmin(1))
    backwards, _ = score(model, items[::-1], 7)
    assert (losses.view(-1, 4) - backwards.view(-1, 4).flip(0)).abs().max() < 1e-3


def test_the_head_sees_the_endings_alone():
    """With and without the narrowed head the losses agree, and the model is left as it was."""
    model, items = make_model(), make_items(6)
    seen = []
    watch = model.lm_head.register_forward_hook(lambda *args: seen.append(len(args[2])))
    losses, rows = score(model, items, 5)
    watch.remove()
    assert seen[0] == 1  # can_share's token
    few = sum(len(ending) for _, endings in rows for ending in endings)
    assert sum(seen[1:]) == few and not losses.requires_grad
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, common.VOCAB_SIZE)

    class Hidden(torch.nn.Module):  # without an lm_head of its own
        def forward(self, idx):
            return model(idx)

    whole, _ = score(Hidden(), items, 5)
    assert (losses - whole).abs().max() < 1e-3


def test_long_contexts_are_cut_from_the_left(capsys):
    item = {"ctx": " ".join(["snow"] * 30 + ["dog"] * 58), "label": 0,
            "endings": ["cat cat cat cat cat"] + ["cat"] * 3}
    rows, cut = hellaswag.make_rows([GOOD, item], MICRO.block_size)
    dog, cat, snow = (common.get_tokenizer().encode_ordinary(f" {word}")[0]
                      for word in ("dog", "cat", "snow"))
    ctx_ids = common.get_tokenizer().encode_ordinary(item["ctx"])
    # 65 tokens: 64 inputs, and the last target
    assert cut == 1 and rows[1] == ([snow] * 2 + [dog] * 58, [[cat] * 5]) and len(rows) == 5
    fits_exactly = hellaswag.make_rows([item], len(ctx_ids) + 4)
    assert hellaswag.make_rows([item], len(ctx_ids) + 3)[1] == 1
    assert fits_exactly == ([(ctx_ids, [[cat] * n for n in (5, 1, 1, 1)])], 0)
    assert hellaswag.evaluate(make_model(), CPU, [GOOD, item])["hellaswag_examples"] == 2
    assert "1 of 2 HellaSwag examples were cut to fit 64 tokens" in capsys.readouterr().out
    long = GOOD | {"endings": ["a", "b", "c", " ".join(["dog"] * 70)]}
    rows, cut = hellaswag.make_rows([long], 64)
    assert cut == 1 and rows[3] == ([dog], [[dog] * 64])


def test_evaluating_leaves_training_as_it_was():
    model = make_model()
    model.config = common.GPTConfig(2, 2, 32, 64, dropout=0.5)
    model.train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    results = [hellaswag.evaluate(model, CPU, make_items(3)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before) and results[0] == results[1]
    assert model.training and all(block.training for block in model.h)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.h[0].mlp = None  # an error must not leave it in eval mode
    with pytest.raises(TypeError):
        hellaswag.evaluate(model, CPU, make_items(3))
    assert model.training


def test_weights_that_are_not_finite():
    model = make_model()
    torch.nn.init.constant_(model.ln_f.bias, float("nan"))
    with pytest.raises(common.UserError, match="not finite"):
        hellaswag.evaluate(model, CPU, make_items(2))


def test_a_compiled_model_is_not_compiled_again():
    model, graphs = make_model(), []
    backend = lambda module, inputs: graphs.append(1) or module.forward
    compiled = torch.compile(model, dynamic=False, backend=backend)
    idx = torch.zeros(2, 16, dtype=torch.long)
    compiled(idx, idx)
    before = len(graphs)
    hellaswag.evaluate(model, CPU, make_items(3))
    compiled(idx, idx)
    assert len(graphs) == before > 0


def run_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank,
                                         world_size=world_size)
    scored, token_losses = [], hellaswag.token_losses
    hellaswag.token_losses = lambda model, device, rows: (
        scored.extend(map(repr, rows)) or token_losses(model, device, rows))
    model, items = make_model(), make_items(24)
    losses, rows = score(model, items, 5)
    torch.save((losses, scored, hellaswag.evaluate(model, CPU, items, 5)), f"{folder}/{rank}.pt")
    common.end_process_group()


def test_two_ranks_share_the_work_and_agree_to_the_last_bit(tmp_path):
    mp.spawn(run_rank, (2, tmp_path.as_posix()), nprocs=2)
    (losses, scored, result), (losses1, scored1, result1) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model, items = make_model(), make_items(24)
    alone, rows = score(model, items, 5)
    assert torch.equal(losses, alone) and torch.equal(losses1, alone)
    assert result == result1 == hellaswag.evaluate(model, CPU, items, 5)
    half = [len(scored) // 2, len(scored1) // 2]  # each was scored twice, by score and by evaluate
    assert min(half) > 8
    assert sorted(scored[: half[0]] + scored1[: half[1]]) == sorted(map(repr, rows))


# Command


def test_command(micro_checkpoint, tmp_path):
    file = write_items(tmp_path / "items.jsonl", make_items(8))
    done = command(hellaswag.__file__, "--checkpoint", micro_checkpoint, "--file", file,
                   "--max-examples", 6, "--device", "cpu", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "6 examples | float32 on cpu" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    weights, model_config = common.load_weights(str(micro_checkpoint))
    model = script("00_orig").GPT(model_config)
    common.load_canonical(model, weights)
    expected = hellaswag.evaluate(model, CPU, hellaswag.load_examples(file)[:6])
    assert result.items() >= (expected | {"dtype": "float32"}).items()
    assert result["examples_per_sec"] > 0


@pytest.mark.parametrize("args, message", [
    (["--file", "bad.jsonl"], "bad.jsonl, line 1: field 'label'"),
    (["--file", "no.jsonl"], "no.jsonl: No such file"),
    (["--file", "good.jsonl", "--json", "no/out.json"], "no/out.json cannot be written"),
    (["--batch-size", "0"], "--batch-size 0: at least 1"),
    (["--checkpoint", "no.pt", "--file", "good.jsonl"], "no.pt")])
def test_command_with_bad_input(args, message, tmp_path, monkeypatch, capsys):
    write_items(tmp_path / "bad.jsonl", [GOOD | {"label": 7}])
    write_items(tmp_path / "good.jsonl", [GOOD])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hellaswag.py", "--device", "cpu", *args])
    monkeypatch.setattr(hellaswag, "keep_freed_memory", lambda: None)
    with pytest.raises(common.UserError, match=message):
        hellaswag.main()


def test_training_script_logs_the_scores(micro, tmp_path):
    (tmp_path / "hellaswag").mkdir()
    write_items(tmp_path / "hellaswag" / "hellaswag_val.jsonl", make_items(5))
    plain = micro("01_opt_single_gpu", "plain", max_steps=4)
    scored = micro("01_opt_single_gpu", "scored", max_steps=4, hellaswag_every=2)
    read = [read_jsonl(out / "metrics.jsonl") for out in (plain, scored)]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in read]
    scores = [row for row in read[1] if "hellaswag_acc_norm" in row]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert [row["step"] for row in scores] == [2, 4]
    assert all(row["hellaswag_examples"] == 5 for row in scores)
