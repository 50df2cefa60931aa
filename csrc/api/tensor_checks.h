// Argument checks on torch::stable::Tensor. They guard memory at the op boundary; the public Python functions check the
// same arguments first and raise TypeError / ValueError. Every text names the argument, what was expected and what
// came.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

namespace sgl_dsv4::api {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "sgl_dsv4_kernels: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <typename... Parts>
inline void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

inline std::string shape_text(const Tensor& t) {
  std::ostringstream text;
  text << "[";
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << "]";
  return text.str();
}

inline constexpr int64_t kAny = -1;  // a free dimension

// Shape of `t`, kAny for a free dimension.
inline void check_shape(const char* name, const Tensor& t, std::initializer_list<int64_t> expected) {
  bool ok = t.dim() == static_cast<int64_t>(expected.size());
  int64_t d = 0;
  for (int64_t want : expected) {
    ok = ok && (want == kAny || t.size(d) == want);
    ++d;
  }
  if (ok) return;
  std::ostringstream text;
  text << "[";
  d = 0;
  for (int64_t want : expected) {
    if (d++) text << ", ";
    if (want == kAny)
      text << "*";
    else
      text << want;
  }
  text << "]";
  fail(name, ": expected shape ", text.str(), ", got ", shape_text(t));
}

inline void check_dtype(const char* name, const Tensor& t, std::initializer_list<ScalarType> expected) {
  for (ScalarType want : expected)
    if (t.scalar_type() == want) return;
  std::ostringstream text;
  for (ScalarType want : expected)
    text << (want == *expected.begin() ? "" : " or ") << torch::headeronly::toString(want);
  fail(name, ": expected dtype ", text.str(), ", got ", torch::headeronly::toString(t.scalar_type()));
}

inline void check_stride(const char* name, const Tensor& t, int64_t dim, int64_t expected) {
  if (t.size(dim) > 1 && t.stride(dim) != expected)
    fail(name, ": expected stride(", dim, ") = ", expected, ", got ", t.stride(dim));
}

// Is every vector of 16 bytes along the last dimension aligned? The stride of a dimension of one entry does not matter.
inline bool is_aligned(const Tensor& t) {
  const int64_t elements = 16 / t.element_size();
  bool ok = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) ok = ok && (t.size(d) <= 1 || t.stride(d) % elements == 0);
  return ok;
}

inline void check_cuda_device(const char* name, const Tensor& t, int32_t device) {
  check(t.is_cuda(), name, ": expected a CUDA tensor, got one on another device");
  check(t.get_device_index() == device, name, ": expected device cuda:", device, ", got cuda:", t.get_device_index());
}

}  // namespace sgl_dsv4::api
