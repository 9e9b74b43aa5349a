// A READY slot, as a host pool leaves it.
#pragma once

#include <cstring>

#include "arena.h"
#include "disk_kit.h"

namespace kv::test {

inline void make_ready(Arena& arena, SlotId slot, const Key& key, const SlotFormat& format, const Payload& payload) {
  std::memcpy(arena.slot(slot), payload.bytes.data(), payload.bytes.size());
  ControlEntry& control = arena.control(slot);
  control.length = static_cast<std::uint32_t>(format.length());
  control.crc = payload.crc;
  control.checked = 1;
  std::memcpy(control.fingerprint, key.bytes.data(), sizeof control.fingerprint);
  control.state = static_cast<std::uint32_t>(SlotState::kReady);
}

}  // namespace kv::test
