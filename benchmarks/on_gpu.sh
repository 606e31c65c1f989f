#!/usr/bin/env bash
# Run everything that needs a GPU once: the demo, the benchmarks, the gpu tests.
# Usage: benchmarks/on_gpu.sh FOLDER [PYTHON]; what was seen is written into FOLDER.
# With two GPUs the consumer is on the same one first and on the other one then.
# PARTS (of demo, bench, trace, tests) and CONSUMERS (GPU numbers) choose what is run;
# MPS=1 runs it all under an MPS server of its own, which ends with it.
# TRANSPORTS, WORKLOADS, ROUNDS, SECONDS_EACH and BENCH_LIMIT (seconds) narrow the benchmarks;
# CORES (0:1) holds the sides of each lane to processors of their own.
set -u
out=$1
python=${2:-python3}
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
transports=${TRANSPORTS:-asyncvmm,asyncvmm_send_all,asyncvmm_reserve,torch_mp,torch_mp_reused,floor,floor_reserve}
workloads=${WORKLOADS:-closed_*,pipelined_*,fanout_2_*,slow_consumer,reuse,connect}
parts=" ${PARTS:-demo bench trace tests} "
status=0
wanted() { [[ $parts == *" $1 "* ]]; }
note() { echo "== $*"; }

if [ "${MPS:-0}" = 1 ]; then
  CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
  export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  nvidia-cuda-mps-control -d || exit
  trap 'echo quit -t 10 | nvidia-cuda-mps-control' EXIT
fi

note machine | tee "$out/machine.txt"
nvidia-smi --query-gpu=name,driver_version,uuid --format=csv,noheader | tee -a "$out/machine.txt"
"$python" -c 'import torch, cuda.bindings, sys; print("torch", torch.__version__, "python", sys.version.split()[0])' | tee -a "$out/machine.txt"
date -u +%Y-%m-%d | tee -a "$out/machine.txt"
gpus=$(nvidia-smi -L | wc -l)

if wanted demo; then
  note demo, all on one GPU
  timeout -k 5 100 "$python" -m asyncvmm.cli demo --device cuda:0 --ranks 2 --batches 100 --json \
    >"$out/demo-one-gpu.json" 2>"$out/demo-one-gpu.err" </dev/null || status=1
  cat "$out/demo-one-gpu.json"
  if [ "$gpus" -gt 1 ]; then
    note demo, ranks on the other GPU
    timeout -k 5 100 "$python" -m asyncvmm.cli demo --device cuda:0 --ranks 2 --batches 100 --json \
      --rank-devices cuda:1,cuda:1 >"$out/demo-two-gpus.json" 2>"$out/demo-two-gpus.err" </dev/null || status=1
    cat "$out/demo-two-gpus.json"
  fi
fi

for device in ${CONSUMERS:-0 $([ "$gpus" -gt 1 ] && echo 1)}; do
  where=(--device cuda:0 --consumer-device "cuda:$device")
  if wanted bench; then
    note "benchmarks, consumer on cuda:$device"
    timeout -k 5 "${BENCH_LIMIT:-400}" "$python" -m benchmarks run "${where[@]}" \
      --transports "$transports" --workloads "$workloads" --rounds "${ROUNDS:-3}" \
      --seconds "${SECONDS_EACH:-0.25}" ${CORES:+--cores "$CORES"} --json "$out/bench-cuda$device.json" \
      >"$out/bench-cuda$device.log" 2>&1 </dev/null || status=1
    cat "$out/bench-cuda$device.log"
    "$python" -m benchmarks report "$out/bench-cuda$device.json" --no-plots </dev/null || status=1
  fi
  if wanted trace; then
    note "driver calls of a hand-off, consumer on cuda:$device"
    timeout -k 5 90 "$python" -m benchmarks trace "${where[@]}" --json "$out/trace-cuda$device.json" \
      >"$out/trace-cuda$device.log" 2>&1 </dev/null || status=1
    cat "$out/trace-cuda$device.json"
  fi
done

if wanted tests; then
  note tests
  timeout -k 5 "${GPU_TEST_SECONDS:-600}" "$python" -m pytest -m gpu tests/gpu -q -p no:cacheprovider \
    >"$out/gpu-tests.log" 2>&1 </dev/null || status=1
  tail -15 "$out/gpu-tests.log"
fi
exit $status
