// Split-KV decode: the contract between the decode kernels, which write partial results, and the combine kernel, which
// merges them. Every backend keeps it. Which keys a split attends to: common/split_partition.h.
//
//   o_accum    [S, T, h, 512] fp32   split s of row t, head i: softmax over the split's own keys times V, normalised by
//                                    the split's own sum
//   lse_accum  [S, T, h] fp32        log2 of that sum: log2(sum over the split's keys of 2^(score * scale * log2(e)))
//
// Empty splits. A split that attends to no key has lse_accum = -inf. Its O is never read, so a kernel need not write
// it. Any other LSE makes the split live, a NaN too: a NaN in the LSE or in O of a live split gives NaN in that (row,
// head) and nowhere else.
//
// Result. With m = max over live splits of lse_accum, w_s = 2^(lse_accum_s - m):
//   out = sum_s w_s O_s / sum_s w_s          lse [T, h] = m * ln(2) + ln(sum_s w_s)   (natural log, without the sink)
// A row without a live split: out = 0, lse = +inf, amax = 0, scales those of the floor below.
//
// Sink. attn_sink [h] is a natural-log score without a value. It enters once, here and in no split:
// out *= 1 / (1 + exp(sink - lse)). -inf = no sink, +inf = output 0, NaN = NaN; a row without a live split is 0 for
// every sink.
//
// Epilogue, on fp32 values, in this order:
//   1. sink factor
//   2. inverse RoPE of the last 64 channels: pair (2i, 2i + 1) times the conjugate of freqs_cis[position][i]. Outside
//      [0, P) no position is looked up: the 64 channels become NaN (not in a row without a live split, which is 0).
//   3. amax [T, h] = max |value| over the 512 channels; NaN if one of them is NaN
//   4. bf16: one rounding to nearest even. fp8: amax of each group (NaN ignored, infinity counted as the largest finite
//      value, floor 1e-10) -> scale -> value / scale as e4m3, nearest even, saturating at 448, NaN -> code 0x7f.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sgl_dsv4 {

// The codes are part of the torch op schemas: never renumber.
enum class OutputKind : int {
  kBf16 = 0,
  // fp8: out [T, h, 512] e4m3, one scale per group of 128 or 32 consecutive channels of a head. Where a word holds four
  // exponent bytes, the lowest byte belongs to the lowest channels.
  kFp8Group128 = 1,       // scale = amax / 448, fp32 [T, h * 4]
  kFp8Group128Ue8m0 = 2,  // scale = 2^ceil(log2(amax / 448)), int32 words [T, h]
  kFp8Group32Ue8m0 = 3,   // the same scale, int32 words [T, h * 4]
};

// Strides count elements. "free" = any stride.
struct CombineParams {
  const float* o_accum;    // [S, T, h, 512], last stride 1, the others multiples of 4, 16-byte aligned
  const float* lse_accum;  // [S, T, h]
  const float* attn_sink;  // [h], stride 1; may be nullptr: no sink
  const float* freqs_cis;  // [P, 64] (cos, sin) interleaved, 8-byte aligned; may be nullptr: no inverse RoPE
  const void* positions;   // [T] int32 or int64; nullptr exactly when freqs_cis is
  void* out;               // [T, h, 512] bf16 or e4m3, last stride 1, the others free (e4m3: multiples of 4)
  float* lse;              // [T, h]
  void* scales;            // see OutputKind; nullptr for bf16
  float* amax;             // [T, h]; may be nullptr: not wanted

  int64_t num_freqs;   // P
  int32_t num_splits;  // S >= 1
  int32_t num_tokens;  // T >= 0
  int32_t num_heads;   // h >= 1; T * h < 2^31
  OutputKind output;
  bool positions_are_int64;
  bool starts_early;  // set by the launch: blocks may start while the previous kernel runs

  int64_t stride_o_accum_split, stride_o_accum_token, stride_o_accum_head;
  int64_t stride_lse_accum_split, stride_lse_accum_token, stride_lse_accum_head;
  int64_t stride_freqs_position;  // even
  int64_t stride_positions_token;
  int64_t stride_out_token, stride_out_head;
  int64_t stride_lse_token, stride_lse_head;
  int64_t stride_scales_token, stride_scales_column;
  int64_t stride_amax_token, stride_amax_head;
};

// Merges the splits of every (row, head) and runs the epilogue. One launch on `stream`, none when T or h is 0. With
// `pdl` it may start while the previous kernel of the stream still runs; it reads nothing before that one has finished.
// Reruns are bit-identical.
cudaError_t launch_combine(const CombineParams& params, bool pdl, cudaStream_t stream);

}  // namespace sgl_dsv4
