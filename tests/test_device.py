"""Every choice that depends on the device, with devices that are not here."""

import sys

import pytest
import torch
from conftest import command

import common


def fake_cuda(monkeypatch, capability=(9, 0), count=1, name="NVIDIA H100 80GB HBM3"):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("capability, expected", [
    ((6, 1), "float32"), ((7, 0), "float16"), ((7, 5), "float16"),
    ((8, 0), "bfloat16"), ((8, 9), "bfloat16"), ((9, 0), "bfloat16")])
def test_gpu_computes_in_the_best_type_it_has(monkeypatch, capability, expected):
    device = fake_cuda(monkeypatch, capability)
    assert common.choose_dtype("auto", device)[0] == expected
    assert common.choose_dtype("float32", device)[0] == "float32"
    if expected != "bfloat16":
        with pytest.raises(common.UserError, match=expected):
            common.choose_dtype("bfloat16", device)


def test_mps_computes_in_float32_and_is_not_compiled():
    mps = torch.device("mps")
    assert common.choose_dtype("auto", mps)[0] == "float32"
    assert common.choose_compile("auto", mps)[0] == "off"
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(common.UserError, match="not reliable on MPS; use --dtype auto"):
            common.choose_dtype(dtype, mps)


def test_a_process_that_does_not_know_its_gpu_is_refused(monkeypatch):
    """As with srun or mpirun: all would train on the first."""
    fake_cuda(monkeypatch, count=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(common.UserError, match="not LOCAL_RANK, the GPU of this process"):
        common.get_device("cuda")


@pytest.mark.parametrize("has, expected", [(True, "bfloat16"), (False, "float32")])
def test_cpu_computes_in_bfloat16_where_it_has_instructions(monkeypatch, has, expected):
    monkeypatch.setattr(common, "cpu_has_bfloat16", lambda: has)
    assert common.choose_dtype("auto", torch.device("cpu"))[0] == expected


def test_device_is_the_best_there_is_and_the_one_asked_for(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert common.get_device("auto").type == "mps"
    assert common.get_device("cpu").type == "cpu"
    assert common.get_device("auto", choices=("cuda", "cpu")).type == "cpu"  # 02: DDP has no MPS
    with pytest.raises(common.UserError, match="there is: mps, cpu"):
        common.get_device("cuda")


def test_local_rank_picks_the_gpu_and_rank_does_not(monkeypatch):
    fake_cuda(monkeypatch, count=2)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert common.get_device("auto") == torch.device("cuda", 1)


def test_more_processes_than_gpus_names_both(monkeypatch):
    fake_cuda(monkeypatch, count=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(common.UserError, match="4 processes .* 2 GPUs"):
        common.get_device("auto")


@pytest.mark.parametrize("name, expected", [
    ("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), ("Tesla T4", 65e12),
    ("NVIDIA H100 NVL", 835e12), ("Tesla V100-PCIE-32GB", 112e12),
    ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12),
    ("NVIDIA GeForce RTX 4090", 165e12), ("NVIDIA A10G", 70e12)])
def test_peak_is_that_of_the_gpu_at_hand(monkeypatch, name, expected):
    flops, source = common.peak_flops(fake_cuda(monkeypatch, name=name), torch.bfloat16)
    assert flops == expected and "data sheet" in source


@pytest.mark.parametrize("name", [
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 NVL",
    "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "GRID T4-16Q", "Unheard-of"])
def test_peak_of_a_gpu_with_a_similar_name_is_measured(monkeypatch, name):
    device = fake_cuda(monkeypatch, name=name)
    monkeypatch.setattr(common, "timed_matmul", lambda a, b: 0.5)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    flops, source = common.peak_flops(device, torch.float32)
    assert flops == 2 * 512**3 / 0.5 and "measured" in source


def test_peak_of_an_unknown_device_is_measured(monkeypatch):
    monkeypatch.setattr(common, "timed_matmul", lambda a, b: 0.5)
    flops, source = common.peak_flops(torch.device("cpu"), torch.float32)
    assert flops == 2 * 512**3 / 0.5 and "measured" in source


def test_without_a_compiler_there_is_one_warning_and_no_compilation(monkeypatch, capsys):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    assert common.choose_compile("auto", torch.device("cpu"))[0] == "off"
    assert capsys.readouterr().out.count("warning: torch.compile does not work here") == 1
    assert common.choose_compile("off", torch.device("cpu"))[0] == "off"


def test_freed_memory_is_left_alone_where_there_is_no_glibc(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(common.ctypes, "CDLL", missing)
    common.keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("keep, expected", [("", False), ("common.keep_freed_memory()", True)])
def test_freed_memory_is_kept_for_the_next_block(tmp_path, keep, expected):
    """Page faults of blocks of 32 MiB (8,192 pages) after one of 64 was freed: few if it is kept."""
    code = f"""
import resource, torch, common
{keep}
def faults(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(megabytes * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(64)
print(min(faults(32) for _ in range(6)))
"""
    faults = int(command("-c", code, cwd=tmp_path).stdout)
    assert (faults < 1000) == expected, faults
