#!/usr/bin/env bash
# Run everything that needs a GPU once: the gpu tests, the demo, the hand-offs beside their floor.
# Usage: benchmarks/on_gpu.sh FOLDER [PYTHON]; what was seen is written into FOLDER.
# With two GPUs the consumer is on the same one first and on the other one then.
set -u
out=$1
python=${2:-python3}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
note() { echo "== $*"; }

note machine | tee "$out/machine.txt"
nvidia-smi --query-gpu=name,driver_version,uuid --format=csv,noheader | tee -a "$out/machine.txt"
"$python" -c 'import torch, cuda.bindings, sys; print("torch", torch.__version__, "python", sys.version.split()[0])' | tee -a "$out/machine.txt"
date -u +%Y-%m-%d | tee -a "$out/machine.txt"
gpus=$(nvidia-smi -L | wc -l)

note demo
timeout -k 5 100 "$python" -m asyncvmm.cli demo --device cuda:0 --ranks 2 --batches 100 --json \
  >"$out/demo-one-gpu.json" 2>"$out/demo-one-gpu.err" </dev/null || status=1
cat "$out/demo-one-gpu.json"
if [ "$gpus" -gt 1 ]; then
  timeout -k 5 100 "$python" -m asyncvmm.cli demo --device cuda:0 --ranks 2 --batches 100 --json \
    --rank-devices cuda:1,cuda:1 >"$out/demo-two-gpus.json" 2>"$out/demo-two-gpus.err" </dev/null || status=1
  cat "$out/demo-two-gpus.json"
fi

for device in 0 $([ "$gpus" -gt 1 ] && echo 1); do
  note "hand-offs, consumer on cuda:$device"
  timeout -k 5 120 "$python" -m benchmarks.gpu_handoff --rounds 5 --consumer-device "cuda:$device" \
    --json "$out/handoff-cuda$device.json" >"$out/handoff-cuda$device.log" 2>&1 </dev/null || status=1
  tail -3 "$out/handoff-cuda$device.log"
done

note tests
timeout -k 5 "${GPU_TEST_SECONDS:-300}" "$python" -m pytest -m gpu tests -q -p no:cacheprovider \
  >"$out/gpu-tests.log" 2>&1 </dev/null || status=1
tail -15 "$out/gpu-tests.log"
exit $status
