#include "shunt/tensor.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <set>

#include "core/apart.hpp"
#include "core/check.hpp"

namespace shunt {
namespace {

TEST(Tensor, ViewsAreRowMajor) {
  std::vector<float> data(24);
  const Tensor tensor = view(data.data(), {2, 3, 4});
  EXPECT_TRUE(tensor.contiguous());
  EXPECT_EQ(tensor.elements(), 24);
  EXPECT_EQ(tensor.bytes(), 96);
  EXPECT_EQ(bytes(DType::f4_e2m1, 7), 4);
  EXPECT_EQ(bytes(DType::f4_e2m1, INT64_MAX), std::int64_t{1} << 62);
  EXPECT_EQ(tensor[1].as<float>(), data.data() + 12);
  EXPECT_EQ(tensor[1].rank, 2);
  EXPECT_EQ(tensor[1].rows(1, 3).as<float>(), data.data() + 16);
  const Tensor turned = tensor[0].transposed();
  EXPECT_EQ(turned.shape[0], 4);
  EXPECT_EQ(turned.strides[0], 1);
  EXPECT_FALSE(turned.contiguous());
  EXPECT_EQ(tensor.describe(), "f32 [2, 3, 4]");
  EXPECT_EQ(Tensor{}.describe(), "(none)");
  EXPECT_FALSE(Tensor{});
  EXPECT_TRUE(view(data.data(), {0, 4}));
}

TEST(Tensor, WithoutElementsIsContiguousWhateverItsStrides) {
  const float none = 0;
  Tensor tensor = view(&none, {3, 0});
  EXPECT_TRUE(tensor.contiguous());
  tensor.strides = {1, 1};
  EXPECT_TRUE(tensor.contiguous());
  tensor.strides = {-8, 0};
  EXPECT_TRUE(tensor.contiguous());
  tensor.shape = {-3, 0};
  EXPECT_FALSE(tensor.contiguous());
  tensor.shape = {0, 3};
  for (const int rank : {-1, max_rank + 1}) {
    tensor.rank = rank;
    EXPECT_FALSE(tensor.contiguous());
    EXPECT_EQ(tensor.elements(), 0);
    EXPECT_THROW(tensor[0], Error);
    EXPECT_THROW(tensor.rows(0, 0), Error);
    EXPECT_THROW(tensor.transposed(0, 1), Error);
  }
}

TEST(Tensor, ElementsOfWhatNoMemoryHolds) {
  const float number = 0;
  Tensor tensor = view(&number, {1, 1, 1});
  constexpr std::int64_t much = std::int64_t{1} << 40;
  tensor.shape = {much, much, much};
  EXPECT_EQ(tensor.elements(), std::numeric_limits<std::int64_t>::max());
  EXPECT_THROW(tensor.bytes(), Error);
  tensor.shape = {much, much, 0};
  EXPECT_EQ(tensor.elements(), 0);
  tensor.shape = {-2, -3, 1};
  EXPECT_EQ(tensor.elements(), 0);
}

TEST(Tensor, RowsBeginAtWholeBytes) {
  const std::array<std::uint8_t, 5> bytes{};
  const Tensor odd = view(static_cast<const void*>(bytes.data()), DType::f4_e2m1, {3, 3});
  EXPECT_EQ(odd[2].as<std::uint8_t>(), bytes.data() + 3);
  EXPECT_THROW(odd[1], Error);
  EXPECT_THROW(odd.rows(1, 3), Error);
}

// Where a row lies is reckoned in 64 bits, or refused.
TEST(Tensor, RowsThatLieTooFar) {
  float numbers[8] = {};
  Tensor t = view(numbers, {8, 1});
  t.strides[0] = std::int64_t{1} << 61;
  EXPECT_THROW((void)t.rows(4, 8), Error);
  EXPECT_THROW((void)t[4], Error);
}

TEST(Tensor, SizesAreChecked) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(view(nullptr, DType::f32, {huge, 2}), Error);
  EXPECT_THROW(view(nullptr, DType::f32, {huge / 2}), Error);
  EXPECT_THROW(view(nullptr, DType::f32, {-1}), Error);
  EXPECT_THROW(view(nullptr, DType::f32, {1, 1, 1, 1, 1}), Error);
  const Tensor tensor = view(nullptr, DType::f32, {2, 2});
  EXPECT_THROW(tensor[2], Error);
  EXPECT_THROW(tensor.rows(1, 3), Error);
  EXPECT_THROW(tensor.transposed(0, 2), Error);
}

TEST(Tensor, ChecksNameWhatIsWrong) {
  std::vector<float> data(12);
  const auto message = [](const Tensor& tensor, const TensorRule& rule) -> std::string {
    try {
      check_tensor("route: logits", tensor, rule, Device{});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const Tensor tensor = view(data.data(), {3, 4});
  EXPECT_EQ(message(tensor, {.dtypes = float_dtypes, .shape = {any_size, 4}}), "");
  EXPECT_EQ(message(tensor, {.dtypes = float_dtypes, .shape = {any_size, 5}}),
            "route: logits is f32 [3, 4]: wrong shape; legal is f32 | bf16 | f16 [any, 5]");
  EXPECT_EQ(message(tensor, {.dtypes = {DType::i32}, .shape = {3, 4}}),
            "route: logits is f32 [3, 4]: wrong dtype; legal is i32 [3, 4]");
  EXPECT_NE(message({}, {.dtypes = float_dtypes, .shape = {3}}).find("missing"), std::string::npos);
  EXPECT_EQ(message(tensor.transposed(), {.dtypes = float_dtypes, .shape = {4, 3}, .dense = true}),
            "route: logits is f32 [4, 3] with strides [1, 4]: it must be dense, row-major");
  EXPECT_NE(
      message(tensor.transposed(), {.dtypes = float_dtypes, .shape = {4, 3}, .rows_dense = true})
          .find("last dimension"),
      std::string::npos);
  Tensor null = tensor;
  null.data = nullptr;
  EXPECT_NE(message(null, {.dtypes = float_dtypes, .shape = {3, 4}}).find("null"),
            std::string::npos);
  Tensor elsewhere = tensor;
  elsewhere.device = {DeviceType::cuda, 0};
  EXPECT_NE(message(elsewhere, {.dtypes = float_dtypes, .shape = {3, 4}}).find("device"),
            std::string::npos);
  try {
    (void)tensor[3];
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "tensor f32 [3, 4]: index 3 is out of range: must be 0 to 2");
  }
}

// Every byte of a matrix.
std::set<const char*> bytes_of(const Tensor& matrix) {
  std::set<const char*> all;
  const int width = bits(matrix.dtype) / 8;
  for (std::int64_t i = 0; i < matrix.shape[0]; ++i) {
    for (std::int64_t j = 0; j < matrix.shape[1] * width; ++j) {
      all.insert(matrix.as<char>() + i * matrix.strides[0] * width + j);
    }
  }
  return all;
}

TEST(Overlap, IsWhatSharesAByte) {
  std::mt19937 random(7);
  const auto drawn = [&](int least, int most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  const std::vector<float> memory(512);
  const auto matrix = [&](DType dtype, std::int64_t row_bytes) {
    Tensor result =
        view(static_cast<const void*>(memory.data()), dtype, {drawn(0, 4), drawn(0, 6)});
    result.strides[0] = row_bytes / (bits(dtype) / 8);
    result.data = result.as<char>() + 4 * drawn(80, 140);
    return result;
  };
  int both = 0;
  for (int i = 0; i < 20000; ++i) {
    // Broadcast too, and from the last row to the first; mostly of one stride.
    const std::int64_t row_bytes = 4 * drawn(-12, 12);
    const std::int64_t other_bytes = drawn(0, 2) == 0 ? 4 * drawn(-12, 12) : row_bytes;
    const Tensor a = matrix(drawn(0, 1) ? f32 : bf16, row_bytes);
    const Tensor b = drawn(0, 1) ? matrix(f32, other_bytes) : view(a.data, bf16, {drawn(0, 3), 4});
    const std::set<const char*> of_a = bytes_of(a);
    bool shared = false;
    for (const char* byte : bytes_of(b)) shared |= of_a.contains(byte);
    ASSERT_EQ(overlap(a, b), shared) << i;
    ASSERT_EQ(overlap(b, a), shared) << i;
    both += shared ? 1 : 0;
  }
  EXPECT_GT(both, 2000);
  EXPECT_LT(both, 18000);
}

TEST(Overlap, OfOtherViewsAndDevices) {
  const std::vector<float> data(64);
  const Tensor tensor = view(data.data(), {4, 8});
  const auto refused = [&](const Tensor& other) {
    try {
      check_apart("gather: rows", tensor, "hidden", other);
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(tensor.rows(3, 4)), "gather: rows overlaps hidden: must lie apart");
  EXPECT_EQ(refused(view(data.data() + 32, {4, 8})), "");
  EXPECT_EQ(refused(tensor.rows(2, 2)), "");
  EXPECT_EQ(refused({}), "");
  EXPECT_EQ(refused(tensor.transposed()), "gather: rows overlaps hidden: must lie apart");
  Tensor other = tensor;
  other.strides[0] = 9;
  Tensor wider = tensor;
  wider.strides[0] = 10;
  EXPECT_TRUE(overlap(other, wider));
  other = tensor;
  other.device = {DeviceType::cuda, 0};
  EXPECT_EQ(refused(other), "");
}

}  // namespace
}  // namespace shunt
