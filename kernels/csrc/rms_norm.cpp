// RMS normalization of BF16 rows in one pass: y = weight * bf16(x / sqrt(mean(x^2) + eps)), FP32 inside.
//
// Rounded where transformers and vLLM round: the normalized value to BF16, then its product with the weight. With a
// residual, x + residual is normalized before it is rounded, as vLLM does it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <optional>
#include <vector>

#include "fp4_block.h"

namespace {

using at::Tensor;
using fp4::F;
using fp4::kLanes;
using fp4::rounded;

constexpr int64_t kGrain = 16384;

inline float lane_sum(F value) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
}

int64_t grain(int64_t cols) { return std::max<int64_t>(1, kGrain / cols); }

// x [R, C] with dense rows; residual [R, C] or none. Returns y, x + residual in BF16 (or nothing) and, if asked for,
// the reciprocal root float32 [R].
std::vector<Tensor> forward(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& weight, double eps,
                            bool keep) {
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  Tensor y = at::empty({rows, cols}, x.options());
  Tensor sum = residual ? at::empty({rows, cols}, x.options()) : Tensor();
  Tensor root = keep ? at::empty({rows}, x.options().dtype(at::kFloat)) : Tensor();
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto* more = residual ? static_cast<const uint16_t*>(residual->const_data_ptr()) : nullptr;
  const int64_t more_stride = residual ? residual->stride(0) : 0;
  const auto* scale = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* out = static_cast<uint16_t*>(y.data_ptr());
  auto* sum_out = residual ? static_cast<uint16_t*>(sum.data_ptr()) : nullptr;
  at::parallel_for(0, rows, grain(cols), [&](int64_t begin, int64_t end) {
    std::vector<float> kept(cols);
    for (int64_t row = begin; row < end; ++row) {
      F squares{};
      for (int64_t c = 0; c < cols; c += kLanes) {
        F value = fp4::load(from + row * stride + c);
        if (more) {
          value += fp4::load(more + row * more_stride + c);
          fp4::store(sum_out + row * cols + c, value);
        }
        fp4::store(kept.data() + c, value);
        squares += value * value;
      }
      const float r = 1.0f / std::sqrt(lane_sum(squares) / static_cast<float>(cols) + static_cast<float>(eps));
      if (keep) root.data_ptr<float>()[row] = r;
      for (int64_t c = 0; c < cols; c += kLanes)
        fp4::store(out + row * cols + c, rounded(fp4::load(kept.data() + c) * r) * fp4::load(scale + c));
    }
  });
  return {y, sum, root};
}

// Gradients of x and weight (BF16) of the form without residual.
std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& root) {
  const int64_t rows = x.size(0), cols = x.size(1), stride = x.stride(0);
  Tensor grad_x = at::empty({rows, cols}, x.options());
  Tensor grad_weight = at::empty({cols}, x.options());
  const auto* from = static_cast<const uint16_t*>(x.const_data_ptr());
  const auto* g = static_cast<const uint16_t*>(grad.const_data_ptr());
  const auto* scale = static_cast<const uint16_t*>(weight.const_data_ptr());
  auto* out = static_cast<uint16_t*>(grad_x.data_ptr());
  // Fixed pieces, summed in order: the weight's gradient does not depend on the number of threads.
  const int64_t piece = 1024, pieces = (rows + piece - 1) / piece;
  std::vector<float> sums(pieces * cols, 0.0f);
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t row = p * piece; row < std::min(rows, (p + 1) * piece); ++row) {
        const float r = root.const_data_ptr<float>()[row];
        F dot{};
        for (int64_t c = 0; c < cols; c += kLanes) {
          const F value = fp4::load(from + row * stride + c) * r;
          const F upper = fp4::load(g + row * cols + c);
          float* total = sums.data() + p * cols + c;
          fp4::store(total, fp4::load(total) + upper * rounded(value));
          dot += rounded(upper * fp4::load(scale + c)) * value;
        }
        const float mean = lane_sum(dot) / static_cast<float>(cols);
        for (int64_t c = 0; c < cols; c += kLanes) {
          const F value = fp4::load(from + row * stride + c) * r;
          const F inner = rounded(fp4::load(g + row * cols + c) * fp4::load(scale + c));
          fp4::store(out + row * cols + c, (inner - value * mean) * r);
        }
      }
  });
  std::vector<float> total(cols, 0.0f);
  for (int64_t p = 0; p < pieces; ++p)
    for (int64_t c = 0; c < cols; ++c) total[c] += sums[p * cols + c];
  for (int64_t c = 0; c < cols; c += kLanes)
    fp4::store(static_cast<uint16_t*>(grad_weight.data_ptr()) + c, fp4::load(total.data() + c));
  return {grad_x, grad_weight};
}

}  // namespace

void define_rms_norm(pybind11::module_& module) {
  using guard = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("rms_norm", &forward, guard());
  module.def("rms_norm_backward", &backward, guard());
}
