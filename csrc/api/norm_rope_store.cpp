#include "api/norm_rope_store.h"

#include "api/device.h"
#include "api/tensor_checks.h"
#include "store/norm_rope_store.h"

namespace sgl_dsv4::api {
namespace {

bool is_multiple_of_16(int64_t bytes) {
  return bytes % 16 == 0;
}
bool starts_at_16(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
}

void check_rows(const char* name, int64_t count) {
  check(count <= kMaxStoreRows, name, ": expected at most ", kMaxStoreRows, ", got ", count);
}

CacheLayout parse_layout(int64_t layout) {
  check(layout == 0 || layout == 1, "layout: expected 0 (v4) or 1 (bf16), got ", layout);
  return static_cast<CacheLayout>(layout);
}

// What both entries share: every argument but positions / plan and their relation to slots.
void fill_common(const Tensor& kv, const Tensor& weight, double eps, const Tensor& freqs_cis, const Tensor& slots,
                 const Tensor& cache, int64_t page_size, int64_t layout, int64_t tokens_per_block, bool pdl,
                 StoreConfig* config, StoreParams* params) {
  const int32_t device = kv.get_device_index();
  check_cuda_device("kv", kv, device);
  check_cuda_device("weight", weight, device);
  check_cuda_device("freqs_cis", freqs_cis, device);
  check_cuda_device("slots", slots, device);
  check_cuda_device("cache", cache, device);

  check_shape("kv", kv, {kAny, kHeadDim});
  check_dtype("kv", kv, {ScalarType::BFloat16, ScalarType::Float});
  check_stride("kv", kv, 1, 1);
  check_rows("kv: rows", kv.size(0));
  check_rows("kv: stride(0)", kv.stride(0));
  check_shape("weight", weight, {kHeadDim});
  check_dtype("weight", weight, {kv.scalar_type()});
  check_stride("weight", weight, 0, 1);
  check_shape("freqs_cis", freqs_cis, {kAny, kRopeDim});
  check_dtype("freqs_cis", freqs_cis, {ScalarType::Float});
  check_stride("freqs_cis", freqs_cis, 1, 1);
  check_stride("freqs_cis", freqs_cis, 0, kRopeDim);
  check_shape("slots", slots, {kAny});
  check_dtype("slots", slots, {ScalarType::Int, ScalarType::Long});
  check_stride("slots", slots, 0, 1);
  check_shape("cache", cache, {kAny, kAny});
  check_stride("cache", cache, 1, 1);
  check(cache.element_size() == 1, "cache: expected a dtype of one byte, got ",
        torch::headeronly::toString(cache.scalar_type()));
  check(page_size > 0 && page_size <= (1 << 30) && (page_size & (page_size - 1)) == 0,
        "page_size: expected a power of two, got ", page_size);
  check(tokens_per_block == 0 || tokens_per_block == 1 || tokens_per_block == 4,
        "tokens_per_block: expected 0 (choose), 1 or 4, got ", tokens_per_block);

  config->layout = parse_layout(layout);
  const int64_t needed = page_bytes(config->layout, page_size);
  check_rows("page_size: bytes of a page", needed);
  check(cache.size(1) >= needed, "cache: expected at least ", needed, " bytes a page for page_size ", page_size,
        ", got ", cache.size(1));
  check_rows("cache: slots", cache.size(0) * page_size);
  check_rows("freqs_cis: rows", freqs_cis.size(0));
  check_rows("slots: entries", slots.size(0));
  check(cache.size(0) <= 1 || cache.stride(0) >= needed, "cache: expected stride(0) >= ", needed, ", got ",
        cache.stride(0));

  config->input_is_fp32 = kv.scalar_type() == ScalarType::Float;
  config->aligned = starts_at_16(kv) && is_multiple_of_16(kv.stride(0) * kv.element_size()) && starts_at_16(weight) &&
                    starts_at_16(freqs_cis) && starts_at_16(cache) && is_multiple_of_16(cache.stride(0));
  config->tokens_per_block = static_cast<int>(tokens_per_block);
  config->pdl = pdl;

  params->kv = kv.data_ptr();
  params->weight = weight.data_ptr();
  params->freqs_cis = static_cast<const float*>(freqs_cis.data_ptr());
  params->slots = slots.data_ptr();
  params->cache = static_cast<uint8_t*>(cache.data_ptr());
  params->stride_kv_row = static_cast<uint32_t>(kv.stride(0));
  params->stride_cache_page = cache.stride(0);
  params->num_positions = static_cast<uint32_t>(freqs_cis.size(0));
  params->num_slots = static_cast<uint32_t>(slots.size(0));
  params->num_slots_in_cache = static_cast<uint32_t>(cache.size(0) * page_size);
  params->num_tokens = static_cast<uint32_t>(kv.size(0));
  params->page_bits = __builtin_ctzll(static_cast<unsigned long long>(page_size));
  params->scale_offset = static_cast<uint32_t>(scale_offset(config->layout, page_size));
  params->eps = static_cast<float>(eps);
  config->slots_are_int64 = slots.scalar_type() == ScalarType::Long;
}

void launch(const char* op, int32_t device, const StoreConfig& config, const StoreParams& params) {
  if (params.num_tokens == 0) return;
  const DeviceGuard guard(device);
  require_device_code(device);
  check_launch(op, launch_norm_rope_store(config, params, current_stream(device)));
}

}  // namespace

void norm_rope_store(Tensor kv, Tensor weight, double eps, Tensor freqs_cis, Tensor positions, Tensor slots,
                     Tensor cache, int64_t page_size, int64_t layout, int64_t tokens_per_block, bool pdl) {
  StoreConfig config = {};
  StoreParams params = {};
  config.entry = StoreEntry::kMain;
  fill_common(kv, weight, eps, freqs_cis, slots, cache, page_size, layout, tokens_per_block, pdl, &config, &params);
  const int32_t device = kv.get_device_index();
  check_cuda_device("positions", positions, device);
  check_shape("positions", positions, {kv.size(0)});
  check_dtype("positions", positions, {ScalarType::Int, ScalarType::Long});
  check_stride("positions", positions, 0, 1);
  check_shape("slots", slots, {kv.size(0)});
  params.positions = positions.data_ptr();
  config.positions_are_int64 = positions.scalar_type() == ScalarType::Long;
  launch("norm_rope_store", device, config, params);
}

void compress_norm_rope_store(Tensor kv, Tensor plan, Tensor weight, double eps, Tensor freqs_cis, Tensor slots,
                              Tensor cache, int64_t page_size, int64_t compress_ratio, bool is_decode, int64_t layout,
                              int64_t tokens_per_block, bool pdl) {
  StoreConfig config = {};
  StoreParams params = {};
  config.entry = is_decode ? StoreEntry::kCompressDecode : StoreEntry::kCompressExtend;
  fill_common(kv, weight, eps, freqs_cis, slots, cache, page_size, layout, tokens_per_block, pdl, &config, &params);
  const int32_t device = kv.get_device_index();
  check_cuda_device("plan", plan, device);
  check_shape("plan", plan, {kv.size(0), 16});
  check_dtype("plan", plan, {ScalarType::Byte});
  check_stride("plan", plan, 1, 1);
  check_stride("plan", plan, 0, 16);
  check(starts_at_16(plan) || kv.size(0) == 0, "plan: expected data that starts at a multiple of 16 bytes");
  check(compress_ratio > 0, "compress_ratio: expected a positive number, got ", compress_ratio);
  check_rows("compress_ratio", compress_ratio);
  if (is_decode) check_shape("slots", slots, {kv.size(0)});
  params.plan = static_cast<const uint4*>(plan.data_ptr());
  params.compress_ratio = static_cast<uint32_t>(compress_ratio);
  params.ratio_reciprocal = ratio_reciprocal(params.compress_ratio);
  launch("compress_norm_rope_store", device, config, params);
}

}  // namespace sgl_dsv4::api
