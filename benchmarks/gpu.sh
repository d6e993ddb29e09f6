#!/usr/bin/env bash
# What is worth measuring on one NVIDIA GPU, with what is installed: bash benchmarks/gpu.sh [FOLDER [PART...]]
# All parts take about 15 minutes; a call ends within BUDGET seconds (470), and the next call with the same FOLDER goes on
# with the parts that are left. A part that fails or runs out of time keeps its log and does not stop the others.
# DRY_RUN=1: the same lines on the CPU, at sizes too small to mean anything. PYTHON: the interpreter (python3).
set -u
out=$(realpath -m "${1:-log/gpu}")
cd "$(dirname "$0")/.." || exit 2
all="environment numerics ladder profile batch_size compile recompute pinned dtype"
parts=${*:2}
python=${PYTHON:-python3}
deadline=$((SECONDS + ${BUDGET:-470}))
mkdir -p "$out" || exit 2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TORCHINDUCTOR_CACHE_DIR="$scratch/inductor" PYTHONUNBUFFERED=1

if [ "${DRY_RUN:-0}" = 1 ]; then
    export TORCHDYNAMO_DISABLE=1  # torch.compile runs the model as it is
    device=cpu
    size="--preset tiny --batch-size 2 --block-size 15 --updates 3 --rounds 1"
    some_checks="--only merged_qkv" some_rows="--rows 3" leave_out=3 changes=compile
    update="--preset tiny --block-size 16 --total-batch-size 32 --batch-size 2 --dtype float32"
else
    device=cuda
    size="--preset gpt2 --batch-size 16 --block-size 1024 --updates 5 --rounds 1"
    some_checks="" some_rows="" leave_out=8 changes=""
    update="--preset gpt2 --block-size 1024 --total-batch-size 65536 --batch-size 64"
fi

environment() {
    nvidia-smi 2>&1 || echo "no nvidia-smi"
    "$python" -c "import torch; print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'cuDNN', torch.backends.cudnn.version())"
}

numerics() { "$python" check_numerics.py "$out/numerics.json" --device $device $some_checks; }

measure() { "$python" benchmarks/ladder.py --device $device $size --out "$out/$part" "$@"; }

ladder() { measure --mode cumulative $some_rows; }
pinned() { measure --mode leave-one-out --rows $leave_out; }
recompute() { measure --mode recompute; }
batch_size() { measure --mode settings --change "${changes:-batch-size}"; }
compile() { measure --mode settings --change "${changes:-compile}"; }
dtype() { measure --mode settings --change "${changes:-dtype}"; }

profile() {  # 01 as it is, on shards of random tokens
    "$python" -c "
import sys, numpy
for split in 'train', 'val':
    numpy.save(f'{sys.argv[1]}/random_{split}_0.npy', numpy.random.default_rng(0).integers(0, 50257, 2**21, numpy.uint16))
" "$scratch" &&
    "$python" 01_opt_single_gpu.py --device $device --data "$scratch" $update --max-steps 12 --val-tokens 1024 \
        --eval-every 0 --sample-every 0 --save-every 0 --profile --out "$out/profile" &&
    gzip -f "$out/profile/trace.json"
}

export -f environment numerics measure ladder pinned recompute batch_size compile dtype profile
export out python device size some_checks some_rows leave_out changes update scratch
declare -A limit=([environment]=30 [numerics]=120 [ladder]=280 [profile]=90 [batch_size]=180 [compile]=200 [recompute]=180
                  [pinned]=90 [dtype]=120)
left="" interrupted="" job=""
trap 'interrupted=1; kill -INT $job 2>/dev/null' INT TERM
for part in ${parts:-$all}; do
    [ -n "${limit[$part]:-}" ] || { echo "gpu.sh: no part $part; there are: $all" >&2; exit 2; }
    [ -n "$parts" ] || [ ! -e "$out/$part.done" ] || continue
    seconds=$((deadline - SECONDS))
    if [ $seconds -lt 20 ]; then left="$left $part"; continue; fi
    [ $seconds -lt "${limit[$part]}" ] || seconds=${limit[$part]}
    export part
    rm -rf "${out:?}/$part"
    echo "== $part (at most $seconds s)"
    start=$SECONDS
    timeout --signal=INT --kill-after=10 "$seconds" bash -c "$part" > >(tee "$out/$part.log") 2>&1 &
    job=$!
    wait $job  # in the background, so that Ctrl-C reaches the trap
    status=$?
    [ -z "$interrupted" ] || { wait $job; exit 130; }
    [ "$status" -ne 0 ] || touch "$out/$part.done"
    [ "$status" -eq 0 ] || left="$left $part"
    echo "== $part: exit code $status after $((SECONDS - start)) s"
done
echo "results are in $out;${left:+ not done:$left (see their logs; the same command goes on with them)}"
[ -z "$left" ]
