#include "api/sparse_decode_sm90.h"

#include <limits>

#include "api/device.h"
#include "api/epilogue_arguments.h"
#include "api/query.h"
#include "common/cache_layout.h"
#include "decode/sm90/sparse_decode.h"

namespace sgl_dsv4::api {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr double kLog2E = 1.4426950408889634;

sm90::Source make_source(bool extra, const Tensor& cache, const Tensor& indices, const OptionalTensor& length,
                         int64_t page_size, int64_t tokens, int32_t device) {
  const char* name = extra ? "extra_cache" : "cache";
  const char* indices_name = extra ? "extra_indices" : "indices";
  const char* length_name = extra ? "extra_topk_length" : "topk_length";
  check_cuda_device(name, cache, device);
  check_shape(name, cache, {kAny, kAny});
  check(cache.element_size() == 1, name, ": expected a dtype of one byte, got ", cache.element_size(), " bytes");
  check_stride(name, cache, 1, 1);
  check(page_size >= 1 && page_size <= kMaxInt, name, ": expected a page size from 1 to 2^31 - 1, got ", page_size);
  const int64_t needed = page_bytes(CacheLayout::kV4, page_size);
  const int64_t pages = cache.size(0);
  check(cache.size(1) >= needed, name, ": expected at least ", needed, " bytes a page, got ", cache.size(1));
  check(pages <= 1 || cache.stride(0) >= needed, name, ": expected stride(0) >= ", needed, ", got ", cache.stride(0));
  check(is_aligned(cache), name, ": expected data and stride(0) that are multiples of 16 bytes");
  check_cuda_device(indices_name, indices, device);
  check_shape(indices_name, indices, {tokens, kAny});
  check_dtype(indices_name, indices, {ScalarType::Int});
  check_stride(indices_name, indices, 1, 1);
  check(indices.size(1) <= kMaxInt - kSplitBlockKeys, indices_name, ": expected a width below 2^31 - 64, got ",
        indices.size(1));

  sm90::Source source = {};
  source.cache = static_cast<const uint8_t*>(cache.data_ptr());
  source.indices = static_cast<const int32_t*>(indices.data_ptr());
  source.stride_page = cache.stride(0);
  source.stride_indices = indices.stride(0);
  source.scales_in_page = scale_offset(CacheLayout::kV4, page_size);
  const int64_t slots = pages > (kMaxInt + 1) / page_size ? kMaxInt + 1 : pages * page_size;
  source.num_slots = static_cast<uint32_t>(slots);
  source.width = static_cast<int32_t>(indices.size(1));
  source.page_size = make_divisor(static_cast<int32_t>(page_size));
  if (length) {
    check_cuda_device(length_name, *length, device);
    check_shape(length_name, *length, {tokens});
    check_dtype(length_name, *length, {ScalarType::Int});
    source.length = static_cast<const int32_t*>(length->data_ptr());
    source.stride_length = length->stride(0);
  }
  return source;
}

// What both ops share.
sm90::DecodeParams make_params(const Tensor& q, const Tensor& cache, const Tensor& indices,
                               const OptionalTensor& topk_length, const OptionalTensor& extra_cache,
                               const OptionalTensor& extra_indices, const OptionalTensor& extra_topk_length,
                               int64_t page_size, int64_t extra_page_size, double softmax_scale, int64_t block_heads,
                               std::optional<double> q_norm_eps, const OptionalTensor& q_freqs_cis,
                               const OptionalTensor& q_positions) {
  const int32_t device = check_query(q);
  const int64_t tokens = q.size(0), heads = q.size(1);
  check(heads >= 1 && heads <= kMaxInt && tokens <= kMaxInt, "q: expected at least one head and fewer than 2^31 rows");
  check(extra_cache.has_value() == extra_indices.has_value(),
        "extra_cache and extra_indices: expected both or neither");

  sm90::DecodeParams p = {};
  p.q = q.data_ptr();
  p.source[0] = make_source(false, cache, indices, topk_length, page_size, tokens, device);
  if (extra_cache)
    p.source[1] = make_source(true, *extra_cache, *extra_indices, extra_topk_length, extra_page_size, tokens, device);
  p.scale_log2 = static_cast<float>(softmax_scale * kLog2E);
  p.num_tokens = static_cast<int32_t>(tokens);
  p.num_heads = static_cast<int32_t>(heads);
  p.num_whole = p.num_tokens;
  p.num_splits = 1;
  check(block_heads == 8 || block_heads == 16 || block_heads == 32 || block_heads == 64,
        "block_heads: expected 8, 16, 32 or 64, got ", block_heads);
  p.block_heads = static_cast<int32_t>(block_heads);
  p.q_is_aligned = is_aligned(q);
  p.stride_q_token = q.stride(0);
  p.stride_q_head = q.stride(1);
  p.query = make_prologue(q_norm_eps, q_freqs_cis, q_positions, tokens, device);
  return p;
}

// Where the rows from `p`'s num_whole on leave their partials.
void fill_partials(const Tensor& o_accum, const Tensor& lse_accum, int64_t rows, int32_t device,
                   sm90::DecodeParams* p) {
  check_cuda_device("o_accum", o_accum, device);
  check_shape("o_accum", o_accum, {kAny, rows, p->num_heads, kHeadDim});
  check_dtype("o_accum", o_accum, {ScalarType::Float});
  check_stride("o_accum", o_accum, 3, 1);
  check_vector_access("o_accum", o_accum, 4);
  const int64_t splits = o_accum.size(0);
  check(splits >= 1 && splits <= kMaxInt, "o_accum: expected 1 to 2^31 - 1 splits, got ", splits);
  check_cuda_device("lse_accum", lse_accum, device);
  check_shape("lse_accum", lse_accum, {splits, rows, p->num_heads});
  check_dtype("lse_accum", lse_accum, {ScalarType::Float});
  p->o_accum = static_cast<float*>(o_accum.data_ptr());
  p->lse_accum = static_cast<float*>(lse_accum.data_ptr());
  p->num_whole = static_cast<int32_t>(p->num_tokens - rows);
  p->num_splits = static_cast<int32_t>(splits);
  p->stride_o_split = o_accum.stride(0);
  p->stride_o_token = o_accum.stride(1);
  p->stride_o_head = o_accum.stride(2);
  p->stride_lse_split = lse_accum.stride(0);
  p->stride_lse_token = lse_accum.stride(1);
  p->stride_lse_head = lse_accum.stride(2);
}

void launch(const char* op, const sm90::DecodeParams& p, int32_t device, bool pdl) {
  if (p.num_tokens == 0) return;
  const DeviceGuard guard(device);
  require_device_code(device);
  check_launch(op, sm90::launch_sparse_decode(p, pdl, current_stream(device)));
}

}  // namespace

void sparse_decode_sm90(Tensor q, Tensor cache, Tensor indices, OptionalTensor topk_length, OptionalTensor extra_cache,
                        OptionalTensor extra_indices, OptionalTensor extra_topk_length, int64_t page_size,
                        int64_t extra_page_size, double softmax_scale, int64_t block_heads, int64_t num_splits,
                        std::optional<double> q_norm_eps, OptionalTensor q_freqs_cis, OptionalTensor q_positions,
                        OptionalTensor attn_sink, OptionalTensor freqs_cis, OptionalTensor positions, int64_t output,
                        bool pdl, Tensor out, Tensor lse, OptionalTensor scales, OptionalTensor amax,
                        OptionalTensor o_accum, OptionalTensor lse_accum) {
  sm90::DecodeParams p =
      make_params(q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size,
                  extra_page_size, softmax_scale, block_heads, q_norm_eps, q_freqs_cis, q_positions);
  const RowsAndHeads n = {q.size(0), q.size(1), q.get_device_index()};
  fill_epilogue(attn_sink, freqs_cis, positions, output, out, lse, scales, amax, n, &p.finish);
  check(o_accum.has_value() == lse_accum.has_value(), "o_accum and lse_accum: expected both or neither");
  if (o_accum) {
    const int64_t rows = o_accum->dim() == 4 ? o_accum->size(1) : 0;
    check(rows >= 1 && rows <= n.tokens, "o_accum: expected partials of 1 to ", n.tokens, " rows, got ", rows);
    check(p.finish.output == OutputKind::kBf16 && !amax, "o_accum: expected bf16 outputs without amax");
    fill_partials(*o_accum, *lse_accum, rows, n.device, &p);
  }
  check(num_splits == 1 || (num_splits == sm90::kPair && block_heads < 64 && !o_accum && !amax),
        "num_splits: expected 1, or ", sm90::kPair, " with fewer than 64 heads a block, without amax and o_accum; got ",
        num_splits);
  if (!o_accum) p.num_splits = static_cast<int32_t>(num_splits);
  launch("sparse_decode_sm90", p, n.device, pdl);
}

void sparse_decode_partial_sm90(Tensor q, Tensor cache, Tensor indices, OptionalTensor topk_length,
                                OptionalTensor extra_cache, OptionalTensor extra_indices,
                                OptionalTensor extra_topk_length, int64_t page_size, int64_t extra_page_size,
                                double softmax_scale, int64_t block_heads, std::optional<double> q_norm_eps,
                                OptionalTensor q_freqs_cis, OptionalTensor q_positions, bool fill_empty, bool pdl,
                                Tensor o_accum, Tensor lse_accum) {
  sm90::DecodeParams p =
      make_params(q, cache, indices, topk_length, extra_cache, extra_indices, extra_topk_length, page_size,
                  extra_page_size, softmax_scale, block_heads, q_norm_eps, q_freqs_cis, q_positions);
  const int32_t device = q.get_device_index();
  fill_partials(o_accum, lse_accum, q.size(0), device, &p);
  p.fill_empty = fill_empty;
  launch("sparse_decode_partial_sm90", p, device, pdl);
}

}  // namespace sgl_dsv4::api
