// Everything.
#pragma once

#include "shunt/activate.hpp"
#include "shunt/checkpoint.hpp"
#include "shunt/combine.hpp"
#include "shunt/context.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"
#include "shunt/gemm.hpp"
#include "shunt/layer.hpp"
#include "shunt/order.hpp"
#include "shunt/route.hpp"
#include "shunt/route_and_order.hpp"
#include "shunt/safetensors.hpp"
#include "shunt/shuffle.hpp"
#include "shunt/sparse.hpp"
#include "shunt/tensor.hpp"
