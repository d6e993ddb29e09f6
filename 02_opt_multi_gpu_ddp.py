"""
GPT-2 training on any number of GPUs and machines; the results are those of 01_opt_single_gpu.py.
[13] process group  [14] each rank its own part  [15] DDP  [16] reduced metrics  [17] one writer
Run: torchrun --standalone --nproc_per_node=8 02_opt_multi_gpu_ddp.py
Without torchrun it is one process. [1] to [12] are explained in 01_opt_single_gpu.py.
"""

import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist  # [13] process group
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel  # [15] DDP

import hellaswag
from common import UpdateSampler, eval_batches, get_device, load_batches, mix_seeds, run_cli
from common import rendezvous  # [13] process group
from run import Run, parse_config


@dataclass
class Config:
    """Settings of a run: a field is a flag, its comment the help. None is chosen and printed."""
    # size of the model; auto: gpt2 on CUDA, tiny elsewhere
    preset: Literal["auto", "tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = "auto"
    # UTF-8 text file or folder of token shards; auto: edu_fineweb10B/, else the embedded text
    data: str = "auto"
    out: str | None = None  # run folder; otherwise log/<script>/<date-time>
    # first weights: scratch, a checkpoint, a Hugging Face folder, or gpt2, gpt2-medium ... (hub)
    init: str = "scratch"
    resume: bool = False  # continue the run in --out, or else the newest run of this script
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # where to train
    seed: int = 1337  # of weights, data order and dropout
    # [6] bfloat16: what matmuls compute in; weights stay float32
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # [9] torch.compile: its mode
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = "auto"
    # [11] recomputation: which activations to drop and compute again, to save memory
    recompute: Literal["off", "mlp", "block"] = "off"
    profile: bool = False  # write a Chrome trace of three updates to the run folder
    # what is learnt
    max_steps: int | None = None  # updates; 19,073 on shards, 100 on a text
    # tokens per update; 524,288 on shards, 16,384 on a text, 2,048 for tiny
    total_batch_size: int | None = None
    batch_size: int | None = None  # sequences per forward pass; speed and memory, not results
    block_size: int | None = None  # tokens per sequence; 1,024, tiny 256
    learning_rate: float | None = None  # the peak; 6e-4, tiny 1e-3
    min_lr: float | None = None  # where the cosine ends; a tenth of the peak
    warmup_steps: int | None = None  # updates of linear warm-up; 715, at most a tenth of all
    weight_decay: float = 0.1  # of matrices and embeddings
    grad_clip: float = 1.0  # largest norm of the gradient; 0: any
    dropout: float = 0.0  # probability
    # evaluation, sampling and saving change nothing that is learnt; 0 turns each off
    eval_every: int | None = None  # updates between validations
    val_tokens: int | None = None  # tokens to validate on; 10,485,760, or all there are
    sample_every: int | None = None  # updates between samples
    hellaswag_every: int = 0  # updates between HellaSwag scores
    save_every: int | None = None  # updates between checkpoints
    keep: int = 2  # checkpoints that stay


class LayerNorm(nn.Module):
    def __init__(self, n_embd):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_embd))
        self.bias = nn.Parameter(torch.zeros(n_embd))

    def forward(self, x):
        # [3] native ops: one kernel for nine
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps=1e-5)


def gelu(x):
    """GELU in GPT-2's tanh form (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")  # [3] native ops: one kernel for eight


def attention(q, k, v, dropout_p):
    """Causal attention; all are (B, n_head, T, head_size)."""
    # [2] SDPA: keeps no (T, T) matrix or mask; compiled for a CPU, the lines below are faster
    if q.device.type != "cpu" or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))  # (B, n_head, T, T)
    future = torch.ones_like(att[0, 0], dtype=torch.bool).triu(1)  # (T, T)
    att = att.masked_fill(future, float("-inf")).softmax(dim=-1)
    return F.dropout(att, dropout_p) @ v


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        # [1] merged QKV: one matmul for three
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # [1] merged QKV
        # (B, T, C) -> (B, n_head, T, head_size)
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in (q, k, v))
        # functions do not look at model.eval()
        y = attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        x = self.c_proj(gelu(self.c_fc(x)))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2 of the shape config (common.GPTConfig), its weights named as OpenAI's."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        # [4] padded vocabulary: 50304 rows, for an aligned matmul
        V, C = math.ceil(config.vocab_size / 64) * 64, config.n_embd
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(config.block_size, C)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        """Logits (B, T, vocab_size) of idx (B, T); with targets (B, T) the mean loss, float32."""
        B, T = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device))  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            x = block(x)
        # [4] padded vocabulary: the padding stays in the model
        logits = self.lm_head(self.ln_f(x))[..., : self.config.vocab_size]
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def get_lr(step, config):
    """Learning rate of update step: linear warm-up from above 0, then a cosine down to min_lr."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 to 0
    return config.min_lr + cosine * (config.learning_rate - config.min_lr)


def parameter_groups(model, weight_decay):
    """For the optimizer: matrices and embeddings decay, biases and norms do not."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decay, "weight_decay": weight_decay},
            {"params": no_decay, "weight_decay": 0.0}]


@torch.no_grad()
def evaluate(model, batches):
    """Mean loss (nats per token) over all tokens of batches, and how many they are."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # summed loss, tokens
    for x, y in batches:
        total += torch.tensor([model(x, y).item() * y.numel(), y.numel()], dtype=torch.float64)
    dist.all_reduce(total)  # [16] reduced metrics: all ranks' sums and counts
    model.train()
    return {"val_loss": (total[0] / total[1]).item(), "val_tokens": int(total[1])}


def main(config):
    # setup; from here on nothing in config is None or "auto"
    # [13] process group: one rank a GPU, started by torchrun
    device = get_device(config.device, choices=("cuda", "cpu"))
    nccl = device.type == "cuda" and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", **rendezvous())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # [5] TF32: for the matmuls left in float32
    # [10] larger micro-batch: as many sequences as fit, so fewer and fuller passes
    # [12] memory reuse: on the CPU, freed blocks are kept rather than faulted in again and again
    # [17] one writer: rank 0 logs, samples and saves
    share = {"rank": rank, "world_size": world_size}
    run = Run(config, __file__, device, max_batch_size=64, reuse_memory=True, **share)
    config = run.config

    # data: the sequences of an update depend on the data, the seed and its number alone
    B = config.batch_size
    sequences = config.total_batch_size // config.block_size
    # [14] each rank its own part: of every update, and of what validates; nothing twice
    grad_accum_steps = sequences // (B * world_size)
    sampler = UpdateSampler(len(run.train_data), sequences, B, config.seed, run.start_step, **share)
    val_batches = eval_batches(len(run.val_data), B, **share)
    # [8] pinned memory: the next batch is read meanwhile, and copied while the GPU computes
    train_batches = load_batches(run.train_data, sampler, device, pin_memory=device.type == "cuda")

    # model and optimizer: raw_model is evaluated, sampled and saved, model is trained
    raw_model = GPT(run.model_config).to(device)
    max_norm = config.grad_clip or math.inf
    groups = parameter_groups(raw_model, config.weight_decay)
    # [7] fused AdamW: one pass over all weights
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    # [6] bfloat16: wherever the model is called; float16 needs a scaled loss, or gradients vanish
    dtype, mixed = getattr(torch, config.dtype), config.dtype != "float32"
    raw_model.forward = torch.autocast(device.type, dtype, enabled=mixed)(raw_model.forward)
    scaler = torch.amp.GradScaler(device.type, enabled=config.dtype == "float16")
    run.attach(raw_model, optimizer, scaler)
    model = raw_model
    # [11] recomputation: activations are computed again in the backward pass; memory, not speed
    parts = {"off": [], "mlp": [block.mlp for block in raw_model.h], "block": raw_model.h}
    checkpoint = torch.utils.checkpoint.checkpoint
    for part in parts[config.recompute]:
        part.forward = lambda x, forward=part.forward: checkpoint(forward, x, use_reentrant=False)
    # [15] DDP: averages the ranks' gradients during the backward pass
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # [9] torch.compile: fuses what lies between the matmuls; raw_model stays as it is
    if config.compile != "off":
        model = torch.compile(model, mode=config.compile, dynamic=False)

    stop = 0  # the signal that ends the run
    for step in range(run.start_step, config.max_steps + 1):  # the last round makes no update
        if run.due(config.eval_every, step) or step == 0:
            run.log_eval(step, evaluate(raw_model, load_batches(run.val_data, val_batches, device)))
        if run.due(config.hellaswag_every, step):
            run.log_eval(step, hellaswag.evaluate(raw_model, device))
        if run.due(config.sample_every, step):
            run.sample(step)
        if run.due(config.save_every, step):
            run.save(step)
        if step == config.max_steps:
            break

        # one update: the gradient of total_batch_size tokens, then one optimizer step
        t0 = time.perf_counter()
        # [14] each rank its own part: and its own dropout
        torch.manual_seed(mix_seeds(config.seed, step, rank))
        lr = get_lr(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss_accum = torch.zeros((), device=device)
        for micro_step in range(grad_accum_steps):
            # [15] DDP: only the last micro-batch exchanges gradients (forward looks at this too)
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
            x, y = next(train_batches)  # (B, T) each
            loss = model(x, y) / grad_accum_steps
            loss_accum += loss.detach()
            scaler.scale(loss).backward()  # [6] bfloat16: in float16 scale, unscale, clip, step
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(raw_model.parameters(), max_norm)  # unscaled
        scaler.step(optimizer)  # not if a gradient overflowed
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        # log
        train_loss = loss_accum.item()  # waits for the device, so that dt is honest
        dt = time.perf_counter() - t0
        stop = run.signal  # Ctrl-C or SIGTERM
        # [16] reduced metrics: the mean loss; the slowest rank's time, a signal to any rank
        ranks = torch.zeros(world_size, 3, dtype=torch.float64)
        ranks[rank] = torch.tensor([train_loss, dt, stop])
        dist.all_reduce(ranks)
        train_loss, dt, stop = ranks[:, 0].mean().item(), *ranks[:, 1:].amax(dim=0).tolist()
        run.log_update(step, train_loss, lr, grad_norm.item(), dt)
        if stop:
            run.save(step + 1)
            break

    run.finish(stop)


if __name__ == "__main__":
    run_cli(lambda: main(parse_config(Config, __doc__)))
