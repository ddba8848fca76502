// activate, plain and in double: what every engine is checked against.
#pragma once

#include "shunt/activate.hpp"

namespace shunt {

// h for one pair of gate and up; `gate` is ignored when the spec is not gated.
double activate_reference(const ActivationSpec& spec, double gate, double up);

}  // namespace shunt
