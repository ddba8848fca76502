#include "convert/plain_experts.hpp"

#include <algorithm>

#include "checkpoint/access.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"

namespace shunt {

namespace {

std::size_t width_of(DType dtype) { return static_cast<std::size_t>(bits(dtype) / 8); }

}  // namespace

// A tensor's part that belongs to one expert is filled and written at once: whatever the order of
// its elements, gate and up together leave no gap in it.
void PlainExperts::write(const ConvertedExpert& expert, const std::vector<SourceMatrix>& matrices) {
  std::map<std::string, std::vector<const SourceMatrix*>> by_tensor;
  for (const SourceMatrix& matrix : matrices) by_tensor[matrix.tensor].push_back(&matrix);
  const std::size_t width = width_of(dtype_);
  for (const auto& [tensor, parts] : by_tensor) {
    std::int64_t begin = parts[0]->offset, end = begin, covered = 0;
    for (const SourceMatrix* part : parts) {
      const Tensor& view = part->view;
      begin = std::min(begin, part->offset);
      covered += view.elements();
      end = std::max(end, part->offset + (view.shape[0] - 1) * view.strides[0] +
                              (view.shape[1] - 1) * view.strides[1] + 1);
    }
    if (end - begin != covered) {
      fail(Status::internal, "convert: an expert's part of {} has gaps", tensor);
    }
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(covered) * width);
    for (const SourceMatrix* part : parts) {
      const ConvertedMatrix& from = expert.matrices[static_cast<std::size_t>(part->which)];
      const Tensor& view = part->view;
      for (std::int64_t n = 0; n < view.shape[0]; ++n) {
        const std::int64_t row = part->offset - begin + n * view.strides[0];
        for (std::int64_t k = 0; k < view.shape[1]; ++k) {
          store_f32(bytes.data(), dtype_, row + k * view.strides[1],
                    from.values[static_cast<std::size_t>(n * view.shape[1] + k)]);
        }
      }
    }
    writer_.write(tensor, bytes.data(), bytes.size(), static_cast<std::size_t>(begin) * width);
    written_[tensor][begin] = end;
  }
}

void PlainExperts::write_gaps() {
  const TensorStore& store = CheckpointAccess::store(checkpoint_);
  const std::size_t width = width_of(dtype_);
  for (const auto& [name, parts] : written_) {
    const Tensor tensor = store.contains(name) ? store.get(name) : Tensor{};
    const bool plain =
        tensor.dtype == DType::f32 || tensor.dtype == DType::bf16 || tensor.dtype == DType::f16;
    if (!tensor || !plain) continue;  // of packed experts everything is written
    const auto copy = [&](std::int64_t begin, std::int64_t end) {
      if (begin >= end) return;
      std::vector<std::uint8_t> bytes(static_cast<std::size_t>(end - begin) * width);
      for (std::int64_t i = begin; i < end; ++i) {
        store_f32(bytes.data(), dtype_, i - begin, load_f32(tensor.data, tensor.dtype, i));
      }
      writer_.write(name, bytes.data(), bytes.size(), static_cast<std::size_t>(begin) * width);
    };
    std::int64_t reached = 0;
    for (const auto& [begin, end] : parts) {
      copy(reached, begin);
      reached = end;
    }
    copy(reached, tensor.elements());
  }
}

}  // namespace shunt
