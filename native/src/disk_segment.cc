#include "disk_segment.h"

namespace kv {

bool segment_may_move(SegmentState from, SegmentState to) noexcept {
  using enum SegmentState;
  switch (from) {
    case kGone: return to == kCreating || to == kFree || to == kSealing || to == kSealed || to == kBroken;
    case kCreating: return to == kFree || to == kGone;
    case kFree: return to == kOpening || to == kGone;  // a file of another size than new ones makes room for one
    case kOpening: return to == kFilling || to == kSealing || to == kBroken;
    case kFilling: return to == kSealing || to == kBroken;
    case kSealing: return to == kSealed || to == kBroken;
    case kSealed: return to == kEvacuating || to == kFree;  // nothing in it lives
    case kEvacuating: return to == kFree || to == kSealed;  // not everything could be moved
    case kBroken: return to == kFree || to == kSealing;
  }
  return false;
}

std::string_view name_of(SegmentState state) noexcept {
  constexpr std::string_view kNames[kSegmentStates] = {"GONE",    "CREATING", "FREE",       "OPENING", "FILLING",
                                                       "SEALING", "SEALED",   "EVACUATING", "BROKEN"};
  return kNames[static_cast<std::size_t>(state)];
}

}  // namespace kv
