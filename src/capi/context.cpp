// Contexts and buffers of the C ABI.
#include <memory>

#include "capi/call.hpp"

using shunt::capi::Call;

shunt_status shunt_context_create_cpu(int32_t threads, shunt_context** context) {
  return shunt::capi::run(__func__, [&](const Call& call) {
    shunt_context*& out = call.not_null("context", context);
    out = new shunt_context{shunt::cpu({.threads = threads})};
  });
}

shunt_status shunt_context_create_cuda(void* stream, int32_t index, shunt_context** context) {
  return shunt::capi::run(__func__, [&](const Call& call) {
    shunt_context*& out = call.not_null("context", context);
    out = new shunt_context{shunt::cuda(stream, index)};
  });
}

shunt_status shunt_context_create_cuda_with(const shunt_cuda_options* options,
                                            shunt_context** context) {
  return shunt::capi::run(__func__, [&](const Call& call) {
    const shunt_cuda_options defaults = SHUNT_CUDA_OPTIONS_INIT;
    const shunt_cuda_options given = call.read("options", options, defaults);
    const bool dependent = call.flag("options.dependent_launch", given.dependent_launch);
    shunt_context*& out = call.not_null("context", context);
    out = new shunt_context{
        shunt::cuda({.stream = given.stream, .index = given.index, .dependent_launch = dependent})};
  });
}

void shunt_context_destroy(shunt_context* context) { delete context; }

int32_t shunt_context_threads(const shunt_context* context) {
  return context == nullptr ? 0 : context->context.threads();
}

shunt_status shunt_context_synchronize(const shunt_context* context) {
  return shunt::capi::run(
      __func__, [&](const Call& call) { call.not_null("context", context).context.synchronize(); });
}

shunt_status shunt_context_copy(const shunt_context* context, void* to, const void* from,
                                size_t size) {
  return shunt::capi::run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    if (size == 0) return;
    on.copy(&call.not_null("to", static_cast<char*>(to)),
            &call.not_null("from", static_cast<const char*>(from)), size);
  });
}

shunt_status shunt_buffer_create(const shunt_context* context, size_t bytes,
                                 shunt_buffer** buffer) {
  return shunt::capi::run(__func__, [&](const Call& call) {
    const shunt::Context& on = call.not_null("context", context).context;
    shunt_buffer*& out = call.not_null("buffer", buffer);
    auto made = std::make_unique<shunt_buffer>();
    made->buffer = on.allocate(bytes);
    out = made.release();
  });
}

void shunt_buffer_destroy(shunt_buffer* buffer) { delete buffer; }

void* shunt_buffer_data(const shunt_buffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->buffer.data();
}

size_t shunt_buffer_bytes(const shunt_buffer* buffer) {
  return buffer == nullptr ? 0 : buffer->buffer.bytes();
}
