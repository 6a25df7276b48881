// The only file that depends on the version of torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

namespace gradferry {

// The collectives of a Backend or ProcessGroup, which were renamed after torch 2.11.
template <typename Group>
c10::intrusive_ptr<c10d::Work> post_all_gather(Group& group, at::Tensor& receive,
                                               at::Tensor& send) {
  if constexpr (requires { group.all_gather_single(receive, send); }) {
    return group.all_gather_single(receive, send);
  } else {
    return group._allgather_base(receive, send);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> post_all_to_all(Group& group, at::Tensor& receive, at::Tensor& send,
                                               std::vector<int64_t>& receive_bytes,
                                               std::vector<int64_t>& send_bytes) {
  if constexpr (requires { group.all_to_all_single(receive, send, receive_bytes, send_bytes); }) {
    return group.all_to_all_single(receive, send, receive_bytes, send_bytes);
  } else {
    return group.alltoall_base(receive, send, receive_bytes, send_bytes);
  }
}

}  // namespace gradferry
