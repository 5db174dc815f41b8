// The quantizer as one pass over memory, for CPUs: backend `compiled` of trace_rl.kernels.
//
// The Python side (trace_rl/kernels/compiled.py) checks shapes and types and makes rows dense; here are loops over rows
// and strips of blocks. Each function returns whether it met NaN or Inf, which only the caller can name.
#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>

#include "fp4_rows.h"

namespace {

using at::Tensor;
using fp4::Guide;
using fp4::Outputs;
using fp4::Scales;
using fp4::with_format;

constexpr int64_t kGrain = 16384;  // values per task: less is not worth a thread

// Calls body(begin, end) in parallel over rows; true if every call returned true.
template <class Body>
bool over_rows(int64_t rows, int64_t cols, const Body& body) {
  std::atomic<bool> finite{true};
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, cols)), [&](int64_t begin, int64_t end) {
    if (!body(begin, end)) finite = false;
  });
  return finite;
}

template <class F>
bool with_bits(int64_t bits, const F& f) {
  switch (bits) {
    case 0: return f.template operator()<0>();
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
  }
  TORCH_CHECK(false, "bits must be 0 to 4");
}

uint8_t* bytes(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<uint8_t*>(tensor->data_ptr()) : nullptr;
}

template <class T>
bool nearest_typed(const Tensor& x, Scales scales, int64_t format, const Outputs<T>& out, int64_t bits,
                   int64_t scale_bits) {
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  const T* values = static_cast<const T*>(x.const_data_ptr());
  return with_format(format, [&]<class Fmt>() {
    return with_bits(bits, [&]<int kBits>() {
      return over_rows(rows, cols, [&](int64_t begin, int64_t end) {
        return fp4::nearest_rows<Fmt, T, kBits>(values, stride, cols, scales, out, scale_bits, begin, end);
      });
    });
  });
}

// x [rows, cols] with dense rows; encode_scale float32 [n], each for `group` rows (0: one for all).
bool nearest(const Tensor& x, const Tensor& encode_scale, int64_t group, int64_t format,
             const std::optional<Tensor>& xhat, const std::optional<Tensor>& codes,
             const std::optional<Tensor>& block_scale, const std::optional<Tensor>& buffer,
             const std::optional<Tensor>& slots, int64_t start, int64_t bits, int64_t scale_bits) {
  const Scales scales{encode_scale.const_data_ptr<float>(), group};
  const auto fill = [&]<class T>(T*) {
    Outputs<T> out;
    out.xhat = xhat ? static_cast<T*>(xhat->data_ptr()) : nullptr;
    out.codes = bytes(codes);
    out.block_scale = bytes(block_scale);
    if (buffer) {
      for (int64_t row = 0; row < x.size(0); ++row) {
        const int64_t slot = slots->const_data_ptr<int64_t>()[row];
        TORCH_CHECK(slot >= 0 && slot < buffer->size(0), "slot ", slot, " lies outside a buffer of ", buffer->size(0), " rows");
      }
      out.record = bytes(buffer) + start;
      out.slots = slots->const_data_ptr<int64_t>();
      out.row_bytes = buffer->stride(0);
    }
    return nearest_typed<T>(x, scales, format, out, buffer ? bits : 0, scale_bits);
  };
  return x.scalar_type() == at::kFloat ? fill(static_cast<float*>(nullptr)) : fill(static_cast<uint16_t*>(nullptr));
}

bool guided(const Tensor& x, const Tensor& planes, const Tensor& block_scale, const Tensor& encode_scale, int64_t group,
            int64_t format, int64_t bits, double reach, const std::optional<Tensor>& valid, const Tensor& xhat) {
  const Scales scales{encode_scale.const_data_ptr<float>(), group};
  const Guide guide{planes.const_data_ptr<uint8_t>(), block_scale.const_data_ptr<uint8_t>(), planes.stride(0),
                    block_scale.stride(0), valid ? valid->const_data_ptr<bool>() : nullptr, static_cast<float>(reach)};
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  const auto run = [&]<class T>(T* out) {
    const T* values = static_cast<const T*>(x.const_data_ptr());
    return with_format(format, [&]<class Fmt>() {
      return with_bits(bits, [&]<int kBits>() {
        return over_rows(rows, cols, [&](int64_t begin, int64_t end) {
          if constexpr (kBits == 0) {
            return true;
          } else {
            return reach < 0
                       ? fp4::guided_rows<Fmt, T, kBits, false>(values, stride, cols, scales, guide, out, begin, end)
                       : fp4::guided_rows<Fmt, T, kBits, true>(values, stride, cols, scales, guide, out, begin, end);
          }
        });
      });
    });
  };
  return x.scalar_type() == at::kFloat ? run(static_cast<float*>(xhat.data_ptr()))
                                       : run(static_cast<uint16_t*>(xhat.data_ptr()));
}

}  // namespace

void define_experts(pybind11::module_& module);
void define_rms_norm(pybind11::module_& module);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  define_experts(module);
  define_rms_norm(module);
  module.def("nearest", &nearest, pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("guided", &guided, pybind11::call_guard<pybind11::gil_scoped_release>());
}
