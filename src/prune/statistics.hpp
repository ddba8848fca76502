// What is known of the inputs that a matrix multiplies, gathered from recorded ones.
#pragma once

#include <cstdint>
#include <vector>

#include "shunt/context.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// Of rows x [R, K]: sums of squares a column, and of products of columns, in double.
class InputStatistics {
 public:
  InputStatistics() : InputStatistics(0) {}
  explicit InputStatistics(std::int64_t width, bool products = false);

  // rows [R, K] f32, dense. Sums run over rows in their order, whatever the number of threads.
  void add(const Context& context, const Tensor& rows);

  std::int64_t width() const { return width_; }  // K
  std::int64_t rows() const { return rows_; }    // R so far
  bool has_products() const { return has_products_; }
  const std::vector<double>& squares() const { return squares_; }  // [K]
  // [K, K], of which the lower triangle and the diagonal count: sum of x_i x_j at [i, j], j <= i.
  const std::vector<double>& products() const { return products_; }

 private:
  std::int64_t width_;
  std::int64_t rows_ = 0;
  bool has_products_;
  std::vector<double> squares_, products_;
};

}  // namespace shunt
