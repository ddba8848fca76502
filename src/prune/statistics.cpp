#include "prune/statistics.hpp"

#include "core/check.hpp"
#include "cpu/pool.hpp"

namespace shunt {

InputStatistics::InputStatistics(std::int64_t width, bool products)
    : width_(width),
      has_products_(products),
      squares_(static_cast<std::size_t>(width), 0.0),
      products_(products ? static_cast<std::size_t>(width * width) : 0, 0.0) {}

void InputStatistics::add(const Context& context, const Tensor& rows) {
  check_tensor("input statistics: rows", rows,
               {.dtypes = {DType::f32}, .shape = {any_size, width_}, .dense = true}, Device{});
  const std::int64_t count = rows.shape[0];
  const float* x = rows.as<const float>();
  rows_ += count;
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t i = 0; i < width_; ++i) {
      const auto value = static_cast<double>(x[r * width_ + i]);
      squares_[static_cast<std::size_t>(i)] += value * value;
    }
  }
  if (!has_products_) return;
  // A thread has some rows of the triangle; small tasks, for the last rows are the longest.
  context.pool().run([&](cpu_engine::Team& team) {
    team.for_each(static_cast<std::size_t>(width_), [&](std::size_t i) {
      double* const sums = products_.data() + i * static_cast<std::size_t>(width_);
      for (std::int64_t r = 0; r < count; ++r) {
        const float* const row = x + r * width_;
        const auto value = static_cast<double>(row[i]);
        if (value == 0) continue;
        for (std::size_t j = 0; j <= i; ++j) sums[j] += value * static_cast<double>(row[j]);
      }
    });
  });
}

}  // namespace shunt
