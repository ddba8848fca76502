// The CUDA engine of activate.
#pragma once

#include "activate/kernels.hpp"
#include "cuda/runtime.hpp"
#include "shunt/quantise.hpp"
#include "shunt/tensor.hpp"

namespace shunt::cuda_engine {

// Tensors as activate() has checked them; `rows` is read on the device.
void activate(const Gpu& gpu, const cpu_engine::ActivationRule& rule, const Tensor& gate,
              const Tensor& up, const Tensor& out, const Tensor& rows);
void activate_quantised(const Gpu& gpu, const cpu_engine::ActivationRule& rule,
                        const QuantiseSpec& quantise, const Tensor& gate, const Tensor& up,
                        const Tensor& out, const Tensor& scales, const Tensor& rows);

}  // namespace shunt::cuda_engine
