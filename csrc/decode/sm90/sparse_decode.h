// The Hopper decode: parameters and launch. What the results mean: decode/decode.h. Kernel: sparse_decode.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/divisor.h"
#include "decode/decode.h"
#include "decode/query.h"

namespace sgl_dsv4::sm90 {

// One paged V4 cache and what rows attend to in it. Strides count elements.
struct Source {
  const uint8_t* cache;    // 16-byte aligned
  const int32_t* indices;  // [T, K], last stride 1
  const int32_t* length;   // [T]; nullptr: K
  int64_t stride_page;     // bytes, a multiple of 16
  int64_t stride_indices, stride_length;
  int64_t scales_in_page;  // byte offset of a page's scales
  uint32_t num_slots;      // pages * page_size, at most 2^31: an index outside [0, num_slots) is not attended
  int32_t width;           // K
  Divisor page_size;
};

// So many splits of a row may be merged on chip, by as many blocks.
inline constexpr int kPair = 2;

struct DecodeParams {
  const void* q;        // [T, h, 512] bf16, last stride 1
  QueryPrologue query;  // what is done to q first
  Source source[2];     // main, extra; without an extra cache its width is 0
  // Of the rows from num_whole on, T' of them: [S, T', h, 512], last stride 1, the others multiples of 4, 16-byte
  // aligned, and [S, T', h]. nullptr if there are none.
  float* o_accum;
  float* lse_accum;
  float scale_log2;  // softmax_scale * log2(e)
  int32_t num_tokens, num_heads;
  int32_t num_whole;    // of the first so many rows the outputs are written, of the others the partials of every split
  int32_t num_splits;   // of these; if there are none 1, or with fewer than 64 heads a block kPair
  int32_t block_heads;  // heads a block: 8, 16, 32 or 64
  Divisor groups, splits;  // blocks that share a row's heads, num_splits: set by the launch
  bool q_is_aligned;       // rows of q start at multiples of 16 bytes
  bool fill_empty;         // write O = 0 for an empty split
  int64_t stride_q_token, stride_q_head;
  int64_t stride_o_split, stride_o_token, stride_o_head;
  int64_t stride_lse_split, stride_lse_token, stride_lse_head;
  CombineParams finish;  // of whole rows: outputs and the epilogue's inputs; the rest is not used
};

// Outputs of the first rows, partials of the others (with both: bf16 outputs without amax). One launch on `stream`,
// none when T is 0; with both kinds of rows two where one does not suit: q or outputs that do not start at multiples of
// 16 bytes, more than six parts an SM, with 64 heads a block more splits than SMs or a driver without tensor maps, with
// fewer no more parts than SMs. With `pdl` it may start while the previous kernel of the stream still runs; it reads
// nothing before that one has finished. Reruns are bit-identical.
cudaError_t launch_sparse_decode(const DecodeParams& params, bool pdl, cudaStream_t stream);

}  // namespace sgl_dsv4::sm90
