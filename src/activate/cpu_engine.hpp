// The CPU engine of activate, and what the GEMM's epilogue shares with it.
#pragma once

#include "activate/kernels.hpp"
#include "cpu/features.hpp"
#include "shunt/activate.hpp"

namespace shunt::cpu_engine {

const ActivateKernels& activate_kernels(Isa isa);
ActivationRule activation_rule(const ActivationSpec& spec);

}  // namespace shunt::cpu_engine
