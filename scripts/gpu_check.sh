#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build, GPU tests, compute-sanitizer, benchmarks. A short table comes last.
#
#   bash scripts/gpu_check.sh [store|decode|all]        (default: all)
#   bash scripts/gpu_check.sh e2e [1|2]                 SGLang servers: 1 correctness, 2 benchmark (default: both)
#   bash scripts/gpu_check.sh tp2 [1|2]                 likewise with two tensor-parallel ranks, on two GPUs
#
# OUT_DIR           where CSV, PNG and summary go (default: benchmark/results/h200), each piece's log in OUT_DIR/logs
# SGL_DSV4_WHEEL    test this wheel instead of building one
# SGL_DSV4_COMMIT   what the CSV calls the commit where there is no git
# E2E_MODEL, E2E_ARGS, E2E_OPTIONS, E2E_SECONDS   model path (tp2: one or more) and flags of the servers, options of
#                   check_serving.py or (e2e 2) bench_serving.py, and time limit of each (default: 500)
# TP2_BENCH         tp2: options of bench_serving.py instead of those below
# A piece that fails does not stop the rest; the exit status is 1 if any failed. With sglang on PYTHONPATH the tests
# compare with its kernels and the benchmark has their column.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
set +e

WHAT="${1:-all}" PART="${2:-}"
case "$WHAT $PART" in "store " | "decode " | "all ") ;;
  "e2e " | "e2e 1" | "e2e 2" | "tp2 " | "tp2 1" | "tp2 2")
    [ -n "${E2E_MODEL:-}" ] || die "$WHAT needs E2E_MODEL, the path of a model" ;;
  *) die "expected store, decode, all, e2e [1|2] or tp2 [1|2], got $*" ;;
esac
OUT_DIR="$(realpath -m "${OUT_DIR:-$ROOT/benchmark/results/h200}")"
LOGS="$OUT_DIR/logs"
mkdir -p "$LOGS"
export MPLCONFIGDIR="${MPLCONFIGDIR:-/tmp/matplotlib}"
failed=0
summary=()

# piece NAME COMMAND ... : runs it, its output into a log; one line here, one in the table
piece() {
  local name="$1" start=$SECONDS status line
  shift
  "$@" > "$LOGS/$name.log" 2>&1
  status=$?
  line="$(printf '%-22s %-9s %4d s   %s' "$name" "$([ $status = 0 ] && echo ok || echo "FAILED $status")" \
    $((SECONDS - start)) "$(last_words "$name")")"
  summary+=("$line")
  echo "$line"
  if [ $status != 0 ]; then
    failed=1
    echo "---- last lines of $LOGS/$name.log"
    tail -n 25 "$LOGS/$name.log"
    echo "----"
  fi
}

# The line of a piece's log that says most.
last_words() {
  local log="$LOGS/$1.log"
  case "$1" in
    build) grep -aE 'for |installing' "$log" | tail -1 ;;
    test_*) grep -aE '(passed|failed|error|skipped|no tests ran).* in [0-9.]+s' "$log" | tail -1 | sed 's/^=* *//; s/ *=*$//' ;;
    memcheck_* | racecheck_* | initcheck_*) grep -aE 'SUMMARY' "$log" | tail -1 | sed 's/^=* *//' ;;
    bench_norm*) grep -a 'speed lines missed' "$log" ;;
    *) tail -n 1 "$log" ;;
  esac
}

build() {  # in a shell of its own: set_up exits where it fails
  (set -e; VERBOSE_BUILD=1 set_up "pytest 7.0 pytest" "hypothesis 6.0 hypothesis" "matplotlib 3.5 matplotlib" "triton 3.6 triton==3.6.0" &&
    cd "$VENV" && "$PY" -c 'import sgl_dsv4_kernels as dk, torch; print(dk.build_info(), torch.cuda.get_device_name())')
}

tests() {  # PLACE ... below test/
  local places=("${@/#/$ROOT/test/}")
  cd "$VENV" && "$PY" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -m "not slow" -p no:cacheprovider -q -ra \
    --durations 8 -W "ignore:Unknown config option" "${places[@]}" | tee "$LOGS/.pytest"
  local status=$?  # pytest's: pipefail
  grep -qaE '[0-9]+ passed' "$LOGS/.pytest" || status=1  # all skipped is no success here
  rm -f "$LOGS/.pytest"
  return $status
}

sanitize() {  # TOOL SCRIPT KERNEL
  local sanitizer
  sanitizer="${COMPUTE_SANITIZER:-}"
  [ -n "$sanitizer" ] || sanitizer="$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)"
  [ -n "$sanitizer" ] || { echo "SUMMARY: compute-sanitizer not found (COMPUTE_SANITIZER=path)"; return 1; }
  cd "$VENV" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$1" --error-exitcode 9 \
    --kernel-regex "kns=$3" "$PY" "$ROOT/scripts/$2"
}

benchmark() {  # NAME ARGUMENT ...
  local name="$1"
  shift
  cd "$VENV" && "$PY" "$ROOT/benchmark/bench_$name.py" --csv "$OUT_DIR/$name.csv" "$@"
}

serving() {  # SCRIPT OPTION ... : ended at the limit, with the servers that it started
  local script="$1"
  shift
  local models
  read -ra models <<< "$E2E_MODEL"
  cd "$VENV" && timeout -k 40 "${E2E_SECONDS:-500}" "$PY" "$ROOT/$script" --model "${models[@]}" \
    --server-args "${E2E_ARGS:-}" --logs "$LOGS/e2e" "$@" ${E2E_OPTIONS:-}
}

# For tensor parallelism. NVLink multicast stays off: a program that uses it can put all GPUs of the host out of service.
tp2() {  # CHECKS OPTION ...
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0  # servers that start side by side fill the GPUs in turns
  local E2E_ARGS="${E2E_ARGS:-} --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
  serving test/e2e/check_serving.py --tp 2 --checks "$@"
}

doctor_pids=()
start_doctors() {  # one for each of the two GPUs, in the background: SGLang's import takes half a minute
  local gpu
  for gpu in 0 1; do
    CUDA_VISIBLE_DEVICES=$gpu timeout 120 sgl-dsv4 doctor > "$LOGS/.doctor$gpu" 2>&1 &
    doctor_pids+=($!)
  done
}

doctors() {  # what they found
  local gpu status=0
  for gpu in 0 1; do
    wait "${doctor_pids[gpu]}" || status=1
    sed "s/^/GPU $gpu: /" "$LOGS/.doctor$gpu"
    rm -f "$LOGS/.doctor$gpu"
  done
  return $status
}

piece build build
export PATH="$VENV/bin:$PATH"
if [ "$WHAT" = e2e ]; then
  [ "$PART" = 2 ] || piece doctor sgl-dsv4 doctor
  [ "$PART" = 2 ] || piece check_serving serving test/e2e/check_serving.py --output "$OUT_DIR/check_serving.txt"
  [ "$PART" = 1 ] ||
    piece bench_serving serving benchmark/bench_serving.py --csv "$OUT_DIR/serving.csv" --plot "$OUT_DIR/serving.png"
fi
if [ "$WHAT" = tp2 ]; then
  bench="${TP2_BENCH:---concurrency 1 8 32 --ttft --profile 1 32 --most-replaced 0.35}"
  bench+=" --csv $OUT_DIR/serving_tp2_{model}.csv"
  if [ "$PART" != 2 ]; then
    start_doctors
    piece test_two_devices tests gpu/test_two_devices.py
    piece doctor doctors
  fi
  case "$PART" in 1) checks=abd ;; 2) checks=t ;; *) checks=abtd ;; esac
  piece check_serving tp2 $checks --output "$OUT_DIR/check_serving_tp2.txt" --bench "$bench"
fi
if [ "$WHAT" = store ] || [ "$WHAT" = all ]; then
  if [ "$WHAT" = all ]; then
    piece test_all tests gpu registered unit/test_store_golden.py unit/test_decode_triton.py
  else
    piece test_store tests gpu/test_store_gpu.py registered unit/test_store_golden.py
  fi
  piece memcheck_store sanitize memcheck sanitize_store.py store_
  piece racecheck_store sanitize racecheck sanitize_store.py store_
  # The speed lines are those of an H200.
  h200=$("$PY" -c 'import torch; print(*["--check"] * ("H200" in torch.cuda.get_device_name()))' 2> /dev/null)
  piece bench_norm_rope_store benchmark norm_rope_store --layout all --plot "$OUT_DIR/norm_rope_store.png" $h200
fi
if [ "$WHAT" = decode ] || [ "$WHAT" = all ]; then
  [ "$WHAT" = all ] || piece test_decode tests gpu/test_{combine,decode_gpu,decode_sm90,query_gpu}.py unit/test_decode_triton.py
  if [ -e "$ROOT/scripts/sanitize_decode.py" ]; then
    piece memcheck_decode sanitize memcheck sanitize_decode.py "_kernel"
    piece racecheck_decode sanitize racecheck sanitize_decode.py "_kernel"
    piece initcheck_decode sanitize initcheck sanitize_decode.py "_kernel"
  fi
  for name in combine sparse_decode; do
    [ -e "$ROOT/benchmark/bench_$name.py" ] && piece "bench_$name" benchmark "$name"
  done
fi

{
  for log in "$LOGS"/check_*.log "$LOGS"/bench_*.log; do
    [ -e "$log" ] && { echo; grep -avE '^\[' "$log"; }
  done
  echo
  printf '%s\n' "${summary[@]}"
  echo "gpu_check $*: $([ $failed = 0 ] && echo ok || echo FAILED), $SECONDS s, results in $OUT_DIR"
} | tee "$OUT_DIR/gpu_check.txt"
exit $failed
