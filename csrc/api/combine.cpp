#include "api/combine.h"

#include <limits>

#include "api/device.h"
#include "api/epilogue_arguments.h"
#include "common/cache_layout.h"
#include "decode/decode.h"

namespace sgl_dsv4::api {
namespace {

// S, T and h, which all tensors share.
struct Sizes : RowsAndHeads {
  int64_t splits;
};

Sizes fill_partials(const Tensor& o_accum, const Tensor& lse_accum, CombineParams* params) {
  const int32_t device = o_accum.get_device_index();
  check_cuda_device("o_accum", o_accum, device);
  check_shape("o_accum", o_accum, {kAny, kAny, kAny, kHeadDim});
  check_dtype("o_accum", o_accum, {ScalarType::Float});
  check_stride("o_accum", o_accum, 3, 1);
  check_vector_access("o_accum", o_accum, 4);
  const Sizes n = {{o_accum.size(1), o_accum.size(2), device}, o_accum.size(0)};
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(n.splits >= 1 && n.splits <= kMax, "o_accum: expected 1 to 2^31 - 1 splits, got ", n.splits);
  check(n.heads >= 1 && n.heads <= kMax, "o_accum: expected 1 to 2^31 - 1 heads, got ", n.heads);
  check(n.tokens <= kMax / n.heads, "o_accum: expected T * h below 2^31, got ", n.tokens, " * ", n.heads);

  check_cuda_device("lse_accum", lse_accum, device);
  check_shape("lse_accum", lse_accum, {n.splits, n.tokens, n.heads});
  check_dtype("lse_accum", lse_accum, {ScalarType::Float});

  params->o_accum = static_cast<const float*>(o_accum.data_ptr());
  params->lse_accum = static_cast<const float*>(lse_accum.data_ptr());
  params->num_splits = static_cast<int32_t>(n.splits);
  params->num_tokens = static_cast<int32_t>(n.tokens);
  params->num_heads = static_cast<int32_t>(n.heads);
  params->stride_o_accum_split = o_accum.stride(0);
  params->stride_o_accum_token = o_accum.stride(1);
  params->stride_o_accum_head = o_accum.stride(2);
  params->stride_lse_accum_split = lse_accum.stride(0);
  params->stride_lse_accum_token = lse_accum.stride(1);
  params->stride_lse_accum_head = lse_accum.stride(2);
  return n;
}

}  // namespace

void combine_splits(Tensor o_accum, Tensor lse_accum, OptionalTensor attn_sink, OptionalTensor freqs_cis,
                    OptionalTensor positions, int64_t output, bool pdl, Tensor out, Tensor lse, OptionalTensor scales,
                    OptionalTensor amax) {
  CombineParams params = {};
  const Sizes n = fill_partials(o_accum, lse_accum, &params);
  fill_epilogue(attn_sink, freqs_cis, positions, output, out, lse, scales, amax, n, &params);
  if (n.tokens == 0) return;
  const DeviceGuard guard(n.device);
  require_device_code(n.device);
  check_launch("combine_splits", launch_combine(params, pdl, current_stream(n.device)));
}

}  // namespace sgl_dsv4::api
