#include "api/query.h"

#include <limits>

#include "api/device.h"
#include "api/epilogue_arguments.h"
#include "common/cache_layout.h"

namespace sgl_dsv4::api {

int32_t check_query(const Tensor& q) {
  const int32_t device = q.get_device_index();
  check_cuda_device("q", q, device);
  check_shape("q", q, {kAny, kAny, kHeadDim});
  check_dtype("q", q, {ScalarType::BFloat16});
  check_stride("q", q, 2, 1);
  return device;
}

QueryPrologue make_prologue(std::optional<double> norm_eps, const OptionalTensor& freqs_cis,
                            const OptionalTensor& positions, int64_t tokens, int32_t device) {
  QueryPrologue prologue = {};
  prologue.has_norm = norm_eps.has_value();
  prologue.eps = norm_eps ? static_cast<float>(*norm_eps) : 0.0f;
  fill_rope(freqs_cis, positions, tokens, device, &prologue);
  return prologue;
}

void query_norm_rope(Tensor q, std::optional<double> norm_eps, OptionalTensor freqs_cis, OptionalTensor positions,
                     bool pdl, Tensor out) {
  const int32_t device = check_query(q);
  const int64_t tokens = q.size(0), heads = q.size(1);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check(heads <= kMax && (heads == 0 || tokens <= kMax / heads), "q: expected T * h below 2^31, got ", tokens, " * ",
        heads);
  check_cuda_device("out", out, device);
  check_shape("out", out, {tokens, heads, kHeadDim});
  check_dtype("out", out, {ScalarType::BFloat16});
  check_stride("out", out, 2, 1);

  QueryParams params = {};
  params.prologue = make_prologue(norm_eps, freqs_cis, positions, tokens, device);
  params.q = q.data_ptr();
  params.out = out.data_ptr();
  params.stride_q_token = q.stride(0);
  params.stride_q_head = q.stride(1);
  params.stride_out_token = out.stride(0);
  params.stride_out_head = out.stride(1);
  params.num_tokens = static_cast<uint32_t>(tokens);
  params.num_heads = static_cast<uint32_t>(heads);
  const bool aligned = is_aligned(q) && is_aligned(out) && (!freqs_cis || is_aligned(*freqs_cis));
  if (tokens == 0 || heads == 0) return;
  const DeviceGuard guard(device);
  require_device_code(device);
  check_launch("query_norm_rope", launch_query_norm_rope(params, aligned, pdl, current_stream(device)));
}

}  // namespace sgl_dsv4::api
