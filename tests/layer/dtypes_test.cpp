// Experts whose matrices are of several dtypes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/layer.hpp"

namespace shunt {
namespace {

using testing::layer_specs;
using testing::RandomLayer;
using testing::run;

// Experts of two dtypes are packed, or named.
TEST(LayerDtypes, ExpertsOfTwo) {
  const Context context = test::engine();
  RandomLayer random(layer_specs()[3].spec, 16);
  LayerWeights weights = random.weights;
  Tensor& other = weights.experts.down[2];
  std::vector<float> numbers(static_cast<std::size_t>(other.elements()));
  for (std::int64_t i = 0; i < other.elements(); ++i) {
    numbers[static_cast<std::size_t>(i)] = load_f32(other.data, other.dtype, i);
  }
  ASSERT_TRUE(other.contiguous());
  other = view(numbers.data(), {other.shape[0], other.shape[1]});
  std::string message;
  try {
    const Layer layer(random.spec, weights, context, {.dtype = DType::bf16});
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_NE(message.find(fmt::format("layer: down of expert 2 is {}: must be bf16, as down of "
                                     "expert 0",
                                     other.describe())),
            std::string::npos)
      << message;
  const LayerInputs in{.hidden = random.hidden_states(5)};
  const LayerOptions packed{.dtype = DType::bf16, .format = {Format::int8}};
  EXPECT_EQ(run(context, Layer(random.spec, weights, context, packed), in).output,
            run(context, Layer(random.spec, random.weights, context, packed), in).output);
}

}  // namespace
}  // namespace shunt
