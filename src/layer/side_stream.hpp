// A second stream beside that of a layer, for what depends on the layer's input alone: the shared
// expert. Events fork and join it, so that a capture of the layer's stream takes it in.
#pragma once

#include "shunt/context.hpp"

namespace shunt {

class SideStream {
 public:
  // `main`: a CUDA context.
  explicit SideStream(const Context& main);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // What side() gets from here on waits for all that the main stream has now.
  void fork() const;
  // What the main stream gets from here on waits for all that side() has now.
  void join() const;
  // The same where another error is on its way to the caller: a capture is not left with a fork.
  void abandon() const noexcept;
  // Neither starts a kernel before its predecessor has ended: at either end of the fork it has two.
  const Context& side() const { return side_; }
  const Context& joined() const { return joined_; }

 private:
  int index_ = 0;
  void* main_ = nullptr;
  void* stream_ = nullptr;
  void *forked_ = nullptr, *ended_ = nullptr;
  Context side_, joined_;
};

}  // namespace shunt
