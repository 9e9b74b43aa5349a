// A thread of ours: it has a name, and the process's signals are for the program's own threads.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <string>
#include <thread>
#include <utility>

namespace kv {

// `work` must not throw: that ends the process. std::system_error when there can be no more threads.
template <class Work>
std::thread start_thread(const std::string& name, Work work) {
  struct SignalsBlocked {
    SignalsBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
    sigset_t before;
  };
  const SignalsBlocked blocked;  // inherited by the thread
  std::thread thread(std::move(work));
  pthread_setname_np(thread.native_handle(), name.c_str());  // at most 15 characters; a longer one is ignored
  return thread;
}

}  // namespace kv
