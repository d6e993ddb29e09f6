"""What README.md says can be typed works, offline, and writes what README.md names."""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
import torch.distributed.run
from conftest import MICRO, ROOT, SCRIPTS, environ, read_jsonl

import check_numerics
import common
import fineweb

README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = re.compile(r"<!-- reference-log:begin -->.*?<!-- reference-log:end -->", re.DOTALL)
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
SPANS = re.findall(r"`([^`\n]+)`", INDENTED.sub("", README))
RUN_FOLDER = re.search(r"^A run folder holds .*?(?=\n\n|\Z)", README, re.DOTALL | re.MULTILINE)[0]
IN_RUN_FOLDER = re.findall(r"`([^`\n]+)`", RUN_FOLDER)
HELLASWAG = "hellaswag/hellaswag_val.jsonl"  # where the download would be

TYPED = [shlex.split(part, comments=True)
         for line in INDENTED.findall(MEASURED.sub("", README)) for part in line.split("&&")]
INLINE = [span.split() for span in SPANS if span.startswith(("python ", "torchrun "))]
COMMANDS = [path.name for path in ROOT.glob("*.py") if "__main__" in path.read_text("utf-8")]


def test_readme_is_read_whole():
    """All that follows goes by what was found in README: here is the least that must be."""
    assert {words[0] for words in TYPED} == {"python", "torchrun", "diff", "pip", "."}
    run = {word for words in TYPED for word in words if word.endswith(".py")}
    assert run == set(COMMANDS)
    assert len(TYPED) > 20 and len(SPANS) > 80 and len(IN_RUN_FOLDER) > 7


# -----------------------------------------------------------------------------
# Commands: their files and flags


class Parser(BaseException):
    """What a command has made when it comes to read its flags; common.run_cli lets it through."""


@functools.cache
def parser_of(name):
    """The parser that the command itself makes, which is ended there."""

    def stop(parser, *args):
        raise Parser(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parser) as stopped:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [name])
        runpy.run_path(str(ROOT / name), run_name="__main__")
    return stopped.value.args[0]


def check_python(first, *rest):
    if first == "-m":
        assert importlib.util.find_spec(rest[0])
        assert "-n" not in rest or importlib.util.find_spec("xdist")
    else:
        parser_of(first).parse_args(rest)


def check_torchrun(*words):
    args = torch.distributed.run.get_args_parser().parse_args(words)
    check_python(args.training_script, *args.training_script_args)


def check_diff(flag, *files):
    assert flag == "-u" and len(files) == 2 and all((ROOT / file).is_file() for file in files)


def check_pip(*words):
    files = [file for flag, file in zip(words, words[1:]) if flag == "-r"]
    assert files and all((ROOT / file).is_file() for file in files)


def check_activate(script):
    assert ["python", "-m", "venv", script.split("/")[0]] in TYPED


CHECKS = {"python": check_python, "torchrun": check_torchrun, "diff": check_diff,
          "pip": check_pip, ".": check_activate}


@pytest.mark.parametrize("words", TYPED + INLINE, ids=" ".join)
def test_a_command_has_files_that_exist_and_flags_that_are_known(words):
    CHECKS[words[0]](*words[1:])


def test_torchrun_is_what_the_end_to_end_test_starts_for_it():
    [script] = importlib.metadata.entry_points(group="console_scripts", name="torchrun")
    assert script.value == "torch.distributed.run:main"


# -----------------------------------------------------------------------------
# What stands in backticks


def is_file(word):
    return re.fullmatch(r"[\w/-]+(\.(py|sh|jsonl?|png|pt)|/)", word)


@pytest.mark.parametrize("name", sorted({w for s in SPANS for w in s.split() if is_file(w)}))
def test_a_file_exists_or_is_one_that_the_end_to_end_test_looks_for(name):
    here = (ROOT / name).is_dir() if name.endswith("/") else (ROOT / name).is_file()
    assert here or name in IN_RUN_FOLDER or name == HELLASWAG


def takes(parser, words):
    """Whether parser knows the flags in words, with the values after them if there are any."""
    for flag, value in zip(words, [*words[1:], "--"]):
        if flag.startswith("--"):
            action = parser._option_string_actions.get(flag)
            if action is None or not value.startswith("--") and not suits(action, value):
                return False
    return True


def suits(action, value):
    value = value if action.type is None else action.type(value)
    return action.nargs != 0 and (action.choices is None or value in action.choices)


FLAGGED = sorted({span for span in SPANS if "--" in span and span.split() not in INLINE})


@pytest.mark.parametrize("span", FLAGGED)
def test_a_flag_is_known_to_the_command_it_is_named_with_or_to_some(span):
    names = [word for word in span.split() if word.endswith(".py")] or COMMANDS
    parsers = [*map(parser_of, names)]
    if names == COMMANDS:
        parsers.append(torch.distributed.run.get_args_parser())
    assert any(takes(parser, span.split()) for parser in parsers)


def test_a_word_is_a_check_or_a_value_of_a_flag():
    """Those of the run folder's paragraph are left to the end-to-end test."""
    found = {s for s in SPANS if re.fullmatch(r"[a-z]\w+", s)} - set(IN_RUN_FOLDER)
    actions = [action for name in COMMANDS for action in parser_of(name)._actions]
    values = {value for a in actions for value in [a.default, *(a.choices or [])]
              if isinstance(value, str)}
    assert len(found) > 20 and found - check_numerics.CHECKS.keys() - values == set()


@pytest.mark.parametrize("suffix", [s for s in SPANS if re.fullmatch(r"\.\w+", s)])
def test_fineweb_reads_files_of_a_suffix(suffix):
    fineweb.find_reader(f"a.txt{suffix}")


@pytest.mark.parametrize("name", [s for s in SPANS if re.fullmatch(r"[A-Z_]{4,}(=\d)?", s)])
def test_an_environment_variable_is_read_by_who_should(name):
    readers = ("torch.distributed.run", "torch.distributed.rendezvous", "huggingface_hub.constants",
               "torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    sources = [Path(importlib.util.find_spec(reader).origin) for reader in readers]
    variable = re.compile(rf"[\"']{name.split('=')[0]}[\"']")
    assert any(variable.search(source.read_text("utf-8")) for source in sources)


@pytest.mark.parametrize("span", [s for s in SPANS if s.startswith("# ")])
def test_a_comment_stands_in_the_scripts(span):
    comment = span.removesuffix("...")
    assert any(comment in (ROOT / f"{name}.py").read_text("utf-8") for name in SCRIPTS)


# -----------------------------------------------------------------------------
# From the first command to the last, as a user

SKIPPED = {  # pattern of a command: why it is not run
    r"-m venv": "the tests run in an environment already",
    r"^\. .venv/bin/activate": "the tests run in an environment already",
    r"^pip install": "downloads",
    r"-m pytest": "that is this",
    r"--init gpt2": "downloads OpenAI's weights",
    r"--nnodes=2": "takes two machines; test_ddp.py starts two launchers",
    r"--nproc_per_node=8 \S+$": "does less than the same with --hellaswag-every",
    r"--max-restarts=2": "does the same; in test_ddp.py a worker dies",
}
PROGRAMS = {"python": [sys.executable], "diff": ["diff"],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
TRAINING = ("--max-steps 2 --total-batch-size 256 --block-size 64 --val-tokens 256 --save-every 1 "
            "--sample-every 2 --compile off --device cpu")
MORE = {  # script: what is appended to its flags, to make it quick
    "check_numerics.py": "--only flops padded_vocabulary",
    "sampling_cpu_mps.py": "--num-samples 1 --max-new-tokens 4",
} | {f"{name}.py": TRAINING for name in SCRIPTS}
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
                        "http://127.0.0.1:9") | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
OFFLINE |= {"no_proxy": "", "NO_PROXY": ""}


def why_skipped(words):
    return next((why for part, why in SKIPPED.items() if re.search(part, " ".join(words))), None)


def script_of(words):
    return next((word for word in words if word in COMMANDS and words[0] != "diff"), None)


def quick(words, folder):
    """README's command with little to do, and with files for what README leaves open."""
    script = script_of(words)
    more = MORE.get(script, "")
    if "--resume" in words:
        more += " --max-steps 3"
    elif more == TRAINING and "--init" not in words:
        more += " --init micro.pt"
    elif words == ["python", "fineweb.py"]:
        more += " --files a.jsonl b.parquet"  # instead of the hub
    words = [word.replace("--nproc_per_node=8", "--nproc_per_node=2") for word in words]
    words = [newest(word, folder) if "/.../" in word else word for word in words]
    return [*PROGRAMS[words[0]], *words[1:], *more.split()]


def run(words, folder):
    """Do it in folder; what was said."""
    env = environ(TMPDIR=str(folder.parent), TIKTOKEN_CACHE_DIR=str(folder.parent), **OFFLINE)
    result = subprocess.run(quick(words, folder), cwd=folder, env=env, capture_output=True,
                            text=True, timeout=120)
    said = f"{' '.join(words)}\n{result.stdout}\n{result.stderr}"
    assert result.returncode == (1 if words[0] == "diff" else 0), said
    return result.stdout


def newest(path, folder):
    """log/.../step_000100.pt -> the checkpoint written last that could be meant."""
    pattern = re.sub(r"step_\d+", "step_*", path.replace("...", "**"))
    found = max(folder.glob(pattern), key=lambda p: p.stat().st_mtime_ns)
    return found.relative_to(folder).as_posix()


def prepare(folder, text):
    """The scripts, and the files that a user has."""
    import pyarrow
    import pyarrow.parquet

    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    (folder / "my_text.txt").write_text(text, encoding="utf-8")
    rows = [{"text": document} for document in text.split("<|endoftext|>")]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[4:]), folder / "b.parquet")
    example = {"ctx": "A man is in the rain. He", "endings": ["opens it.", "is.", "sat.", "ran."],
               "label": 0}
    (folder / HELLASWAG).parent.mkdir()
    (folder / HELLASWAG).write_text(json.dumps(example) + "\n")


def check(words, output, folder):
    """Whether a command that has run did what README says."""
    script = script_of(words)
    if words[0] == "diff":
        assert output.startswith(f"--- {words[2]}")
    elif MORE.get(script) == TRAINING:
        check_training(words, output, folder)
    elif "results.json" in words:
        results = json.loads((folder / "results.json").read_text("utf-8"))
        assert results["checks" if script == "check_numerics.py" else "texts"]
        assert results["environment"]["torch"]
        (folder / "results.json").unlink()
    elif script == "fineweb.py":
        out = words[words.index("--out") + 1] if "--out" in words else "edu_fineweb10B"
        assert fineweb.check_manifest(folder / out)["documents"] == 8
    elif script == "hf_weights.py":
        check_export(folder / words[-1])
    else:
        assert script == "hellaswag.py" and "acc_norm" in output


def check_training(words, output, folder):
    out = folder / re.search(r"summary.json, metrics.jsonl and loss.png are in (\S+)", output)[1]
    assert out.parent == folder / "log" / Path(script_of(words)).stem
    assert re.search(r"\| loss \d", output) and "| sample: " in output
    settings = json.loads((out / "run.json").read_text("utf-8"))
    assert settings["environment"]["torch"] and settings["config"]["max_steps"]
    assert settings["world_size"] == (2 if words[0] == "torchrun" else 1)
    if "--data" in words:
        assert settings["data"] == words[words.index("--data") + 1]
    check_run_folder(out, updates=3 if "--resume" in words else 2)
    if "--hellaswag-every" in words:
        assert "hellaswag_acc_norm" in read_jsonl(out / "metrics.jsonl")[-1]


def check_run_folder(out, updates):
    """All that the paragraph on the run folder names."""
    [keys] = [span.split() for span in IN_RUN_FOLDER if span.startswith("step ")]
    rows = read_jsonl(out / "metrics.jsonl")
    assert [list(row) for row in rows if "loss" in row] == [keys] * updates
    assert any("val_loss" in row for row in rows)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    for span in IN_RUN_FOLDER:
        if re.fullmatch(r"\w+", span):
            assert span in keys or summary[span] > 0, span
        elif is_file(span):
            assert list(out.glob(span.replace("NNNNNN", "[0-9]" * 6))), span
    assert matplotlib.image.imread(out / "loss.png", format="png").std() > 0
    for path in out.glob("step_*.pt"):
        weights = torch.load(path, weights_only=True)["model"]
        assert f"{len(weights['wte.weight']):,} rows" in RUN_FOLDER


def check_export(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder)("A text", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [common.get_tokenizer().encode("A text")]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.n_embd == MICRO.n_embd and model(ids).logits.isfinite().all()


def test_the_commands_one_after_the_other(tmp_path, micro_checkpoint, text_file, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "fresh clone"
    folder.mkdir()
    prepare(folder, text_file.read_text("utf-8"))
    shutil.copy(micro_checkpoint, folder / "micro.pt")
    before = {path.name for path in folder.iterdir()}
    for words in TYPED:
        if why := why_skipped(words):
            print(f"not run: {' '.join(words)}: {why}")
        else:
            check(words, run(words, folder), folder)
    written = {path.name for path in folder.iterdir()} - before - {"__pycache__"}
    assert written == {"log", "my_shards", "edu_fineweb10B", "my_gpt2"}
    logs = [re.sub("<.*?>", "*", span) for span in SPANS if span.startswith("log/")]
    assert logs and all(list(folder.glob(pattern)) for pattern in logs)


@pytest.mark.parametrize("part", SKIPPED)
def test_what_is_skipped_stands_in_readme(part):
    assert any(re.search(part, " ".join(words)) for words in TYPED)
