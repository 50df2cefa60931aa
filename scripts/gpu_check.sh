#!/usr/bin/env bash
# What needs a GPU, each line below in one call: build, GPU tests, compute-sanitizer, benchmarks. A short table comes last.
#
#   bash scripts/gpu_check.sh [store|decode|all] [1|2]  1 tests and compute-sanitizer, 2 benchmarks (default: all, both)
#   bash scripts/gpu_check.sh e2e [1|2]                 SGLang servers: 1 correctness, 2 benchmark (default: both)
#   bash scripts/gpu_check.sh tp2 [1|2]                 likewise with two tensor-parallel ranks, on two GPUs
#
# Tests run in several processes, compute-sanitizer's tools beside them and each other; benchmarks run alone, afterwards.
#
# OUT_DIR           where CSV, PNG and summary go (default: benchmark/results/h200), each piece's log in OUT_DIR/logs.
#                   The PNG of the servers, that is: scripts/results.py --plots draws the others
# SGL_DSV4_WHEEL    test this wheel instead of building one
# SGL_DSV4_COMMIT   what the CSV calls the commit where there is no git
# TEST_PROCESSES    processes of the tests (default: by cores and GPU memory, at most 6; 1 without pytest-xdist)
# PIECE_SECONDS     time limit of tests, sanitizer and benchmark, each (default: 420; 1200 for tests in one process)
# COMPUTE_SANITIZER path of compute-sanitizer, 2026.1 or newer (default: from the package nvidia-cuda-sanitizer-api)
# E2E_MODEL, E2E_ARGS, E2E_OPTIONS, E2E_SECONDS   model path (tp2: one or more) and flags of the servers, options of
#                   check_serving.py or (e2e 2) bench_serving.py, and time limit of each (default: 500; tp2: 900)
# TP2_BENCH         tp2: options of bench_serving.py instead of those below
# A piece that fails does not stop the rest; the exit status is 1 if any failed. With sglang on PYTHONPATH the tests
# compare with its kernels and the benchmark has their column.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
set +e

WHAT="${1:-all}" PART="${2:-}"
case "$WHAT $PART" in
  "store "* | "decode "* | "all "*) [[ "$PART" =~ ^[12]?$ ]] || die "expected 1, 2 or nothing behind $WHAT, got $PART" ;;
  "e2e " | "e2e 1" | "e2e 2" | "tp2 " | "tp2 1" | "tp2 2")
    [ -n "${E2E_MODEL:-}" ] || die "$WHAT needs E2E_MODEL, the path of a model" ;;
  *) die "expected store, decode, all, e2e or tp2, and 1, 2 or nothing, got $*" ;;
esac
OUT_DIR="$(realpath -m "${OUT_DIR:-$ROOT/benchmark/results/h200}")"
LOGS="$OUT_DIR/logs"
mkdir -p "$LOGS"
export MPLCONFIGDIR="${MPLCONFIGDIR:-/tmp/matplotlib}"
failed=0
summary=() names=() groups=()  # groups: process groups of the pieces that run

# start NAME COMMAND ... : a piece, in the background and in a process group of its own, its output in a log
start() {
  local name="$1"
  shift
  rm -f "$LOGS/.$name"
  set -m
  (
    trap : TERM  # it stays until its command has ended
    begun=$SECONDS
    "$@"
    status=$?
    echo $((SECONDS - begun)) > "$LOGS/.$name"
    exit $status
  ) > "$LOGS/$name.log" 2>&1 < /dev/null &
  set +m
  names+=("$name") groups+=($!)
}

# Waits for all pieces that were started: one line each here, and in the table. What a piece leaves running is killed.
finish() {
  local i name status seconds line
  for i in "${!names[@]}"; do
    name="${names[i]}"
    wait "${groups[i]}"
    status=$?
    kill -KILL -- "-${groups[i]}" 2> /dev/null
    seconds="$(cat "$LOGS/.$name" 2> /dev/null)"
    rm -f "$LOGS/.$name"
    # All skipped is no success here.
    [[ $status != 0 || $name != test_* ]] || grep -qaE '[0-9]+ passed' "$LOGS/$name.log" || status=1
    line="$(printf '%-22s %-9s %4s s   %s' "$name" "$([ $status = 0 ] && echo ok || echo "FAILED $status")" \
      "${seconds:-?}" "$(last_words "$name")")"
    summary+=("$line")
    echo "$line"
    if [ $status != 0 ]; then
      failed=1
      echo "---- last lines of $LOGS/$name.log"
      tail -n 25 "$LOGS/$name.log"
      echo "----"
    fi
  done
  names=() groups=()
}

piece() {  # NAME COMMAND ... : alone
  start "$@"
  finish
}

GRACE=40  # seconds from TERM to KILL: check_serving.py and bench_serving.py end their servers

stop() {
  local group end=$((SECONDS + GRACE))
  trap '' INT TERM
  for group in "${groups[@]}"; do kill -TERM -- "-$group" 2> /dev/null; done
  for group in "${groups[@]}"; do
    while kill -0 "$group" 2> /dev/null && [ $SECONDS -lt $end ]; do sleep 0.2; done
    kill -KILL -- "-$group" 2> /dev/null
  done
  exit 130
}
trap stop INT TERM

# limited SECONDS COMMAND ... : not in a group of its own, so that finish and stop reach what it starts
limited() { timeout --foreground -k $GRACE "$@"; }

# The line of a piece's log that says most.
last_words() {
  local log="$LOGS/$1.log"
  case "$1" in
    build) grep -aE 'for |installing' "$log" | tail -1 ;;
    test_*) grep -aE '(passed|failed|error|skipped|no tests ran).* in [0-9.]+s' "$log" | tail -1 | sed 's/^=* *//; s/ *=*$//' ;;
    *check_store | *check_decode) grep -aE 'SUMMARY' "$log" | tail -1 | sed 's/^=* *//' ;;
    bench_norm*) grep -a 'speed lines missed' "$log" ;;
    *) tail -n 1 "$log" ;;
  esac
}

build() {  # in a shell of its own: set_up exits where it fails
  (
    set -e
    VERBOSE_BUILD=1 set_up "pytest 7.0 pytest" "hypothesis 6.0 hypothesis" "matplotlib 3.7 matplotlib" "triton 3.6 triton==3.6.0"
    need_optional "pytest_timeout 2.0 pytest-timeout" "pytest_xdist 3.2 pytest-xdist"
    need_optional "nvidia_cuda_sanitizer_api 13.2 nvidia-cuda-sanitizer-api"
    cd "$VENV" && "$PY" -c 'import sgl_dsv4_kernels as dk, torch; print(dk.build_info(), torch.cuda.get_device_name())'
  )
}

# How many processes share the GPU: most of a test's time is Triton's compiler, on one core, and some hold 15 GiB.
test_processes() {
  "$PY" -c 'import os, torch, xdist
memory = torch.cuda.get_device_properties(0).total_memory
print(max(1, min(6, len(os.sched_getaffinity(0)) // 2, memory // (20 << 30))))' 2> /dev/null || echo 1
}

tests() {  # PROCESSES PLACE ... below test/
  local processes="$1" seconds options=()
  shift
  local places=("${@/#/$ROOT/test/}")
  if [ "$processes" -gt 1 ]; then
    options+=(-n "$processes" --dist worksteal)
    export OMP_NUM_THREADS=2
  fi
  # By a thread: a test that waits for the GPU takes no signal. It ends the process, which pytest-xdist replaces.
  "$PY" -c 'import pytest_timeout' 2> /dev/null && options+=(--timeout 150 --timeout-method thread)
  seconds="${PIECE_SECONDS:-$([ "$processes" -gt 1 ] && echo 420 || echo 1200)}"
  cd "$VENV" && limited "$seconds" "$PY" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -m "not slow" \
    -p no:cacheprovider -q -ra --durations 8 -W "ignore:Unknown config option" "${options[@]}" "${places[@]}"
}

# Versions before 2026.1 take warp-specialised kernels for races: the package's is preferred to the toolkit's.
find_sanitizer() {
  local packaged
  packaged="$(ls "$VENV"/lib/python*/site-packages/nvidia/*/compute-sanitizer/compute-sanitizer 2> /dev/null | head -1)"
  echo "${COMPUTE_SANITIZER:-${packaged:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)}}"
}

sanitize() {  # TOOL SCRIPT : our kernels alone (Triton's has no namespace in its name)
  local sanitizer options=() port=$((49152 + 16 * ${#groups[@]}))  # of its own: several run at once
  sanitizer="$(find_sanitizer)"
  [ -n "$sanitizer" ] || { echo "SUMMARY: compute-sanitizer not found (COMPUTE_SANITIZER=path)"; return 1; }
  case "$1" in racecheck | synccheck) options=(--num-cuda-barriers 64) ;; esac  # mbarriers that PTX initialises are not counted
  cd "$VENV" && PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited "${PIECE_SECONDS:-420}" "$sanitizer" --tool "$1" \
    --error-exitcode 9 --port $port --target-processes application-only "${options[@]}" \
    --kernel-name kns=sgl_dsv4 --kernel-name kns=sparse_decode_kernel "$PY" "$ROOT/scripts/$2"
}

benchmark() {  # NAME ARGUMENT ...
  local name="$1"
  shift
  cd "$VENV" && limited "${PIECE_SECONDS:-420}" "$PY" "$ROOT/benchmark/bench_$name.py" --csv "$OUT_DIR/$name.csv" "$@"
}

serving() {  # SCRIPT OPTION ... : ended at the limit, with the servers that it started
  local script="$1"
  shift
  local models
  read -ra models <<< "$E2E_MODEL"
  cd "$VENV" && limited "${E2E_SECONDS:-500}" "$PY" "$ROOT/$script" --model "${models[@]}" \
    --server-args "${E2E_ARGS:-}" --logs "$LOGS/e2e" "$@" ${E2E_OPTIONS:-}
}

# For tensor parallelism. NVLink multicast stays off: a program that uses it can put all GPUs of the host out of service.
tp2() {  # CHECKS OPTION ...
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0  # servers that start side by side fill the GPUs in turns
  local E2E_SECONDS="${E2E_SECONDS:-900}"
  local E2E_ARGS="${E2E_ARGS:-} --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
  serving test/e2e/check_serving.py --tp 2 --checks "$@"
}

doctors() {  # on each of the two GPUs, at once: SGLang's import takes half a minute
  local gpu status=0 processes=()
  for gpu in 0 1; do
    CUDA_VISIBLE_DEVICES=$gpu limited 120 sgl-dsv4 doctor > "$LOGS/.doctor$gpu" 2>&1 &
    processes+=($!)
  done
  for gpu in 0 1; do
    wait "${processes[gpu]}" || status=1
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
    start test_two_devices tests 1 gpu/test_two_devices.py
    start doctor doctors
    finish
  fi
  case "$PART" in 1) checks=abd ;; 2) checks=t ;; *) checks=abtd ;; esac
  piece check_serving tp2 $checks --output "$OUT_DIR/check_serving_tp2.txt" --bench "$bench"
fi
wants() { [ "$WHAT" = "$1" ] || [ "$WHAT" = all ]; }
if { wants store || wants decode; } && [ "$PART" != 2 ]; then
  case "$WHAT" in
    store) places=(gpu/test_store_gpu.py registered unit/test_store_golden.py) ;;
    decode) places=(gpu/test_{combine,decode_gpu,decode_hopper,query_gpu}.py unit/test_decode_triton.py) ;;
    all) places=(gpu registered unit/test_store_golden.py unit/test_decode_triton.py) ;;
  esac
  start "test_$WHAT" tests "${TEST_PROCESSES:-$(test_processes)}" "${places[@]}"
  if wants store; then
    for tool in memcheck racecheck; do start ${tool}_store sanitize $tool sanitize_store.py; done
  fi
  if wants decode; then
    for tool in memcheck racecheck initcheck synccheck; do start ${tool}_decode sanitize $tool sanitize_decode.py; done
  fi
  finish
fi
if [ "$PART" != 1 ]; then
  if wants store; then
    # On an H200 it names the speed lines that are missed. That is no failure here: times are no tests.
    piece bench_norm_rope_store benchmark norm_rope_store --layout all
  fi
  if wants decode; then
    piece bench_combine benchmark combine
    piece bench_sparse_decode benchmark sparse_decode
    piece bench_decode_chain benchmark decode_chain
  fi
fi

{
  for line in "${summary[@]}"; do
    name="${line%% *}"
    case "$name" in check_serving | bench_*) echo; grep -avE '^\[' "$LOGS/$name.log" ;; esac
  done
  echo
  printf '%s\n' "${summary[@]}"
  echo "gpu_check $*: $([ $failed = 0 ] && echo ok || echo FAILED), $SECONDS s, results in $OUT_DIR"
} | tee "$OUT_DIR/gpu_check${PART:+_$PART}.txt"
exit $failed
