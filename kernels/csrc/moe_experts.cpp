// Routed SwiGLU experts on a CPU, forward and backward: what trace_rl.qat.experts and the rollout engine do in a dozen
// passes over memory, tile by tile in the cache.
//
// Pairs (token, expert) are sorted by expert and worked on in tiles of at most 32 rows of one expert, so every matrix
// product has one of two constant shapes (oneDNN compiles a kernel per shape) and no row is padded beyond its tile.
// Products are oneDNN's (brgemm: AMX or AVX-512), BF16 operands, FP32 sums; results are rounded to BF16 wherever the
// plain PyTorch version rounds: after each product, after SiLU and after the gate. Weights come packed for brgemm: two
// neighbours of the reduction dimension beside each other (VNNI).
//
// N tokens, K experts per token, P = N*K pairs, E experts, H hidden, I expert width.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "fp4_rows.h"

namespace {

using at::Tensor;
using fp4::F;
using fp4::kLanes;
namespace blas = at::native::cpublas;

constexpr int64_t kTile = 32, kHalfTile = 16;

// e^x to about one unit in the last place of FP32; results are rounded to BF16.
inline F exponential(F x) {
  x = x < -87.0f ? fp4::broadcast(-87.0f) : x;
  x = x > 88.0f ? fp4::broadcast(88.0f) : x;
  const F shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's lowest bits are the nearest integer
  const F n = shifted - 12582912.0f;
  const F r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return (F)((fp4::I)p + (((fp4::I)shifted - 0x4B400000) << 23));
}

inline F sigmoid(F x) { return 1.0f / (1.0f + exponential(-x)); }

using fp4::rounded;

uint16_t* data(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }
const uint16_t* values(const Tensor& tensor) { return static_cast<const uint16_t*>(tensor.const_data_ptr()); }

// c [rows, n] (FP32) = a [rows, k] times b (VNNI, [k/2, n, 2]).
void multiply(int64_t rows, int64_t n, int64_t k, const uint16_t* a, const uint16_t* b, float* c, bool add = false) {
  blas::brgemm(rows, n, k, k, n, n, add, reinterpret_cast<const at::BFloat16*>(a),
               reinterpret_cast<const at::BFloat16*>(b), c, true);
}

void to_bf16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) fp4::store(to + i, fp4::load(from + i));
}

// Rows of one expert: pairs [begin, begin + count) of the sorted order, in a product of `rows` rows.
struct Tile {
  int64_t expert, begin, count, rows;
};

// Pairs sorted by expert: `pair_of` the sorted row, `row_of` the pair; expert e has rows [first[e], first[e + 1]).
struct Plan {
  std::vector<int64_t> pair_of, row_of, first;
  std::vector<Tile> tiles;

  Plan(const int64_t* ids, int64_t num_pairs, int64_t num_experts)
      : pair_of(num_pairs), row_of(num_pairs), first(num_experts + 1, 0) {
    for (int64_t p = 0; p < num_pairs; ++p) {
      TORCH_CHECK(ids[p] >= 0 && ids[p] < num_experts, "expert id ", ids[p], " of ", num_experts);
      ++first[ids[p] + 1];
    }
    for (int64_t e = 0; e < num_experts; ++e) first[e + 1] += first[e];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t p = 0; p < num_pairs; ++p) {
      const int64_t row = next[ids[p]]++;
      pair_of[row] = p;
      row_of[p] = row;
    }
    for (int64_t e = 0; e < num_experts; ++e)
      for (int64_t row = first[e]; row < first[e + 1]; row += kTile) {
        const int64_t count = std::min(kTile, first[e + 1] - row);
        tiles.push_back({e, row, count, count > kHalfTile ? kTile : kHalfTile});
      }
  }
};

// Values that each thread keeps in its cache.
template <class T>
struct Scratch {
  std::vector<T> storage;
  T* at;

  explicit Scratch(int64_t count) : storage(count + 64) {
    at = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(storage.data()) + 63) & ~uintptr_t{63});
  }
};

struct Sizes {
  int64_t tokens, top_k, experts, hidden, inter;
};

// Rows of x [N, H] that a tile's pairs belong to, zeros below them.
void gather(const uint16_t* x, const Plan& plan, const Tile& tile, const Sizes& s, uint16_t* out) {
  for (int64_t i = 0; i < tile.count; ++i)
    std::memcpy(out + i * s.hidden, x + plan.pair_of[tile.begin + i] / s.top_k * s.hidden, 2 * s.hidden);
  std::memset(out + tile.count * s.hidden, 0, 2 * s.hidden * (tile.rows - tile.count));
}

// [rows, cols] -> [cols, rows].
void transpose(const uint16_t* from, int64_t rows, int64_t cols, uint16_t* to) {
  for (int64_t col = 0; col < cols; col += kLanes)
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = 0; j < kLanes; ++j) to[(col + j) * rows + row] = from[row * cols + col + j];
}

// [rows, cols] -> VNNI [rows/2, cols, 2]: the right factor of a sum over rows.
void interleave(const uint16_t* from, int64_t rows, int64_t cols, uint16_t* to) {
  for (int64_t row = 0; row < rows; row += 2)
    for (int64_t col = 0; col < cols; ++col) {
      to[row * cols + 2 * col] = from[row * cols + col];
      to[row * cols + 2 * col + 1] = from[(row + 1) * cols + col];
    }
}

// silu(gate) * up of [rows, 2I] -> [rows, I].
void activate(const uint16_t* gate_up, int64_t rows, int64_t inter, uint16_t* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < inter; i += kLanes) {
      const F gate = fp4::load(gate_up + row * 2 * inter + i);
      const F up = fp4::load(gate_up + row * 2 * inter + inter + i);
      fp4::store(out + row * inter + i, rounded(gate * sigmoid(gate)) * up);
    }
}

// Gradients of gate and up [rows, 2I] from the hidden vector's [rows, I] (FP32, as the product left it).
void activate_backward(const uint16_t* gate_up, const float* grad, int64_t rows, int64_t inter, uint16_t* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < inter; i += kLanes) {
      const F gate = fp4::load(gate_up + row * 2 * inter + i);
      const F up = fp4::load(gate_up + row * 2 * inter + inter + i);
      const F g = rounded(fp4::load(grad + row * inter + i));
      const F sigma = sigmoid(gate);
      const F silu = rounded(gate * sigma);
      fp4::store(out + row * 2 * inter + i, rounded(g * up) * (sigma * (1.0f + gate * (1.0f - sigma))));
      fp4::store(out + row * 2 * inter + inter + i, g * silu);
    }
}

// Round the hidden vectors of `rows` rows to FP4 in place.
void quantize(uint16_t* hidden, int64_t rows, int64_t inter, float encode_scale, int64_t format) {
  fp4::Outputs<uint16_t> out;
  out.xhat = hidden;
  const fp4::Scales scales{&encode_scale, 0};
  fp4::with_format(format, [&]<class Fmt>() {
    return fp4::nearest_rows<Fmt, uint16_t, 0>(hidden, inter, inter, scales, out, 8, 0, rows);
  });
}

struct Saved {
  Plan plan;
  Sizes sizes;
  Tensor x, gate_up, hidden, out;  // [N, H], then sorted rows [P, 2I], [P, I], [P, H]
};

void combine(const Plan& plan, const Sizes& s, const uint16_t* rows, const float* weights, uint16_t* out) {
  at::parallel_for(0, s.tokens, 256, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t h = 0; h < s.hidden; h += kLanes) {
        F sum{};
        for (int64_t k = 0; k < s.top_k; ++k)
          sum += fp4::load(rows + plan.row_of[n * s.top_k + k] * s.hidden + h) * weights[n * s.top_k + k];
        fp4::store(out + n * s.hidden + h, sum);
      }
  });
}

// x [N, H]; gate values float32 and ids int64 [N, K]; weights VNNI [E, H/2, 2I, 2] and [E, I/2, H, 2] for the products
// with x and with the hidden vector. fc2_format -1: the hidden vector stays BF16. Returns [N, H] and, when `keep`, what
// the backward needs.
std::pair<Tensor, std::shared_ptr<Saved>> forward(const Tensor& x, const Tensor& weights, const Tensor& ids,
                                                  const Tensor& gate_up, const Tensor& down, int64_t fc2_format,
                                                  double fc2_scale, bool keep) {
  const Sizes s{x.size(0), ids.size(1), gate_up.size(0), x.size(1), down.size(1) * 2};
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && gate_up.scalar_type() == at::kInt && down.scalar_type() == at::kInt,
              "x must be bfloat16 and the experts packed pairs of it");
  TORCH_CHECK(gate_up.sizes() == at::IntArrayRef({s.experts, s.hidden / 2, 2 * s.inter}) &&
                  down.sizes() == at::IntArrayRef({s.experts, s.inter / 2, s.hidden}),
              "experts of ", gate_up.sizes(), " and ", down.sizes(), " do not fit x of ", x.sizes());
  TORCH_CHECK(ids.size(0) == s.tokens && weights.sizes() == ids.sizes(), "a gate value and an id per token and expert");
  TORCH_CHECK(s.hidden % kTile == 0 && s.inter % kTile == 0, "sizes must be multiples of ", kTile);
  auto saved = std::make_shared<Saved>(
      Saved{Plan(ids.const_data_ptr<int64_t>(), s.tokens * s.top_k, s.experts), s, x, {}, {}, {}});
  const Plan& plan = saved->plan;
  const int64_t num_pairs = s.tokens * s.top_k;
  saved->out = at::empty({num_pairs, s.hidden}, x.options());
  if (keep) {
    saved->gate_up = at::empty({num_pairs, 2 * s.inter}, x.options());
    saved->hidden = at::empty({num_pairs, s.inter}, x.options());
  }
  at::parallel_for(0, plan.tiles.size(), 1, [&](int64_t begin, int64_t end) {
    Scratch<uint16_t> rows(kTile * s.hidden), both(kTile * 2 * s.inter), hidden(kTile * s.inter);
    Scratch<float> product(kTile * std::max(2 * s.inter, s.hidden));
    for (int64_t t = begin; t < end; ++t) {
      const Tile& tile = plan.tiles[t];
      gather(values(x), plan, tile, s, rows.at);
      multiply(tile.rows, 2 * s.inter, s.hidden, rows.at, values(gate_up) + tile.expert * 2 * s.inter * s.hidden,
               product.at);
      to_bf16(product.at, both.at, tile.rows * 2 * s.inter);
      activate(both.at, tile.rows, s.inter, hidden.at);
      if (fc2_format >= 0) quantize(hidden.at, tile.count, s.inter, static_cast<float>(fc2_scale), fc2_format);
      multiply(tile.rows, s.hidden, s.inter, hidden.at, values(down) + tile.expert * s.inter * s.hidden, product.at);
      to_bf16(product.at, data(saved->out) + tile.begin * s.hidden, tile.count * s.hidden);
      if (keep) {
        std::memcpy(data(saved->gate_up) + tile.begin * 2 * s.inter, both.at, 4 * tile.count * s.inter);
        std::memcpy(data(saved->hidden) + tile.begin * s.inter, hidden.at, 2 * tile.count * s.inter);
      }
    }
    blas::brgemm_release();
  });
  Tensor out = at::empty(x.sizes(), x.options());
  combine(plan, s, values(saved->out), weights.const_data_ptr<float>(), data(out));
  return {out, keep ? saved : nullptr};
}

// Gradients of x [N, H], the gate values float32 [N, K], gate_up [E, 2I, H] and down [E, H, I], BF16. Weights VNNI
// [E, I, H, 2] (gate_up) and [E, H/2, I, 2] (down) for the products with the gradients. Straight through the hidden
// vector's rounding.
std::vector<Tensor> backward(const Tensor& grad, const Saved& saved, const Tensor& weights, const Tensor& gate_up,
                             const Tensor& down) {
  const Plan& plan = saved.plan;
  const Sizes& s = saved.sizes;
  const int64_t num_pairs = s.tokens * s.top_k;
  TORCH_CHECK(grad.scalar_type() == at::kBFloat16 && grad.sizes() == saved.x.sizes(), "a gradient of another output");
  const float* gate_values = weights.const_data_ptr<float>();
  Tensor grad_x = at::empty({s.tokens, s.hidden}, grad.options());
  Tensor grad_weights = at::empty({s.tokens, s.top_k}, weights.options());
  Tensor grad_gate_up = at::empty({s.experts, 2 * s.inter, s.hidden}, grad.options());
  Tensor grad_down = at::empty({s.experts, s.hidden, s.inter}, grad.options());
  Tensor grad_rows = at::empty({num_pairs, s.hidden}, grad.options());
  std::vector<int64_t> first_tile(s.experts + 1, 0);
  for (const Tile& tile : plan.tiles) ++first_tile[tile.expert + 1];
  for (int64_t e = 0; e < s.experts; ++e) first_tile[e + 1] += first_tile[e];
  at::parallel_for(0, s.experts, 1, [&](int64_t begin, int64_t end) {
    Scratch<uint16_t> rows(kTile * s.hidden), turned(kTile * std::max(s.hidden, 2 * s.inter));
    Scratch<uint16_t> both(kTile * 2 * s.inter), hidden(kTile * s.inter);
    Scratch<uint16_t> paired(kTile * std::max(s.hidden, s.inter));
    Scratch<float> product(kTile * std::max(s.inter, s.hidden));
    Scratch<float> sum_gate_up(2 * s.inter * s.hidden), sum_down(s.hidden * s.inter);
    for (int64_t e = begin; e < end; ++e) {
      bool more = false;
      for (int64_t t = first_tile[e]; t < first_tile[e + 1]; ++t) {
        const Tile& tile = plan.tiles[t];
        // The gradient of each pair's output: the token's times its gate value.
        for (int64_t i = 0; i < tile.count; ++i) {
          const int64_t pair = plan.pair_of[tile.begin + i];
          const uint16_t* token = values(grad) + pair / s.top_k * s.hidden;
          const uint16_t* result = values(saved.out) + (tile.begin + i) * s.hidden;
          const F gate = rounded(fp4::broadcast(gate_values[pair]));
          F dot{};
          for (int64_t h = 0; h < s.hidden; h += kLanes) {
            const F g = fp4::load(token + h);
            dot += g * fp4::load(result + h);
            fp4::store(rows.at + i * s.hidden + h, g * gate);
          }
          float total = 0;
          for (int lane = 0; lane < kLanes; ++lane) total += dot[lane];
          grad_weights.data_ptr<float>()[pair] = total;
        }
        std::memset(rows.at + tile.count * s.hidden, 0, 2 * s.hidden * (tile.rows - tile.count));
        std::memset(hidden.at, 0, 2 * tile.rows * s.inter);
        std::memcpy(hidden.at, values(saved.hidden) + tile.begin * s.inter, 2 * tile.count * s.inter);
        multiply(tile.rows, s.inter, s.hidden, rows.at, values(down) + e * s.inter * s.hidden, product.at);
        activate_backward(values(saved.gate_up) + tile.begin * 2 * s.inter, product.at, tile.count, s.inter, both.at);
        std::memset(both.at + tile.count * 2 * s.inter, 0, 4 * s.inter * (tile.rows - tile.count));

        transpose(rows.at, tile.rows, s.hidden, turned.at);
        interleave(hidden.at, tile.rows, s.inter, paired.at);
        multiply(s.hidden, s.inter, tile.rows, turned.at, paired.at, sum_down.at, more);

        multiply(tile.rows, s.hidden, 2 * s.inter, both.at, values(gate_up) + e * 2 * s.inter * s.hidden, product.at);
        to_bf16(product.at, data(grad_rows) + tile.begin * s.hidden, tile.count * s.hidden);

        gather(values(saved.x), plan, tile, s, rows.at);
        transpose(both.at, tile.rows, 2 * s.inter, turned.at);
        interleave(rows.at, tile.rows, s.hidden, paired.at);
        multiply(2 * s.inter, s.hidden, tile.rows, turned.at, paired.at, sum_gate_up.at, more);
        more = true;
      }
      const int64_t count_up = 2 * s.inter * s.hidden, count_down = s.hidden * s.inter;
      if (more) {
        to_bf16(sum_gate_up.at, data(grad_gate_up) + e * count_up, count_up);
        to_bf16(sum_down.at, data(grad_down) + e * count_down, count_down);
      } else {  // an expert without tokens
        std::memset(data(grad_gate_up) + e * count_up, 0, 2 * count_up);
        std::memset(data(grad_down) + e * count_down, 0, 2 * count_down);
      }
    }
    blas::brgemm_release();
  });
  const std::vector<float> ones(num_pairs, 1.0f);
  combine(plan, s, values(grad_rows), ones.data(), data(grad_x));
  return {grad_x, grad_weights, grad_gate_up, grad_down};
}

// Whether oneDNN multiplies BF16 in VNNI form here. Asked by trying: could_pack() wants AMX, but AVX-512 BF16 will do.
bool supported() {
  try {
    std::vector<uint16_t> ones(kTile * kTile, 0x3F80);
    std::vector<float> sums(kTile * kTile);
    multiply(kTile, kTile, kTile, ones.data(), ones.data(), sums.data());
    blas::brgemm_release();
    return std::all_of(sums.begin(), sums.end(), [](float sum) { return sum == kTile; });
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

void define_experts(pybind11::module_& module) {
  using guard = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Saved, std::shared_ptr<Saved>>(module, "Saved").def_readonly("hidden", &Saved::hidden);
  module.def("experts_supported", &supported);
  module.def("experts_forward", &forward, guard());
  module.def("experts_backward", &backward, guard());
}
