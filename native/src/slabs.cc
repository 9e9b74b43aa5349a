#include "slabs.h"

#include <algorithm>
#include <string>

namespace kv {

namespace {
// Slot ids leave the top bit alone and kNone out of range: 8 TiB in pages.
constexpr std::size_t kCapacityMax = (std::size_t{1} << 31) * kPageBytes;
}  // namespace

Slabs::Slabs(std::size_t capacity_bytes, std::size_t slab_bytes)
    : capacity_bytes_(capacity_bytes / kPageBytes * kPageBytes), slab_bytes_(slab_bytes) {
  if (slab_bytes == 0 || slab_bytes % kHugeBytes != 0)
    throw Invalid("slab_bytes: must be a positive multiple of 2 MiB, got " + std::to_string(slab_bytes));
  if (capacity_bytes_ == 0 || capacity_bytes_ > kCapacityMax)
    throw Invalid("capacity_bytes: must be in [4 KiB, 8 TiB], got " + std::to_string(capacity_bytes));
  const std::size_t count = (capacity_bytes_ + slab_bytes - 1) / slab_bytes;
  slabs_.resize(count);
  free_slabs_ = FreeIds(count);
  free_slabs_.add_range(0, count);
  classes_.reserve(kClassesMax);
}

std::size_t Slabs::bytes_of(std::uint32_t slab) const noexcept {
  return std::min(slab_bytes_, capacity_bytes_ - std::size_t{slab} * slab_bytes_);
}

std::size_t Slabs::find_class(std::size_t slot_bytes) const noexcept {
  const std::size_t wanted = round_up(slot_bytes, kPageBytes);
  for (std::size_t c = 0; c < classes_.size(); ++c)
    if (classes_[c].slot_bytes == wanted) return c;
  return kClassesMax;
}

std::size_t Slabs::class_for(std::size_t slot_bytes) {
  if (slot_bytes == 0) throw Invalid("format: a slot must have at least one byte");
  const std::size_t largest = bytes_of(0);
  if (slot_bytes > largest)
    throw Invalid("slab_bytes: a block of this layout needs a slot of " + std::to_string(slot_bytes) +
                  " bytes, a slab has " + std::to_string(largest) + "; raise slab_bytes in the configuration" +
                  (largest < slab_bytes_ ? " and capacity_bytes" : ""));
  std::size_t c = find_class(slot_bytes);
  if (c != kClassesMax) return c;
  // A size without slabs is forgotten when another one needs its place.
  c = classes_.size();
  if (c == kClassesMax)
    for (c = 0; c < kClassesMax && classes_[c].slabs > 0;) ++c;
  if (c == kClassesMax)
    throw Invalid("format: " + std::to_string(kClassesMax) + " slot sizes are in use; no room for another");
  Class fresh;
  fresh.slot_bytes = round_up(slot_bytes, kPageBytes);
  fresh.open = FreeIds(slabs_.size());
  if (c == classes_.size())
    classes_.push_back(std::move(fresh));
  else
    classes_[c] = std::move(fresh);
  return c;
}

// Gives the class a free slab, if one slot fits it.
bool Slabs::claim(std::size_t size_class, std::uint32_t slab) {
  Class& owner = classes_[size_class];
  const std::size_t slots = bytes_of(slab) / owner.slot_bytes;
  if (slots == 0) return false;
  FreeIds free(slots);
  free.add_range(0, slots);
  slabs_[slab].free = std::move(free);
  slabs_[slab].size_class = size_class;
  free_slabs_.remove(slab);
  capacity_slots_ += slots;
  ++owner.slabs;
  owner.open.add(slab);
  return true;
}

SlotId Slabs::take(std::size_t size_class) {
  Class& owner = classes_[size_class];
  if (!owner.open.has(owner.slab)) {
    if (owner.open.count() == 0) {
      // The only slab of another size is the last one, which is tried last.
      const std::uint32_t slab = free_slabs_.next(0);
      if (slab == kNone || !claim(size_class, slab)) return kNone;
    }
    owner.slab = owner.open.next(0);  // lowest first: high slabs get a chance to become empty
    owner.index = 0;
  }
  Slab& slab = slabs_[owner.slab];
  const std::uint32_t index = slab.free.take(owner.index);
  owner.index = index + 1;
  if (slab.free.count() == 0) owner.open.remove(owner.slab);
  ++taken_slots_;
  return slot_at({owner.slab, index});
}

bool Slabs::adopt(SlotId slot, std::size_t slot_bytes) {
  const std::size_t offset = std::size_t{slot} * kPageBytes, size = round_up(slot_bytes, kPageBytes);
  if (slot == kNone || slot_bytes == 0 || offset >= capacity_bytes_) return false;
  const auto slab = static_cast<std::uint32_t>(offset / slab_bytes_);
  if (offset % slab_bytes_ % size != 0 || offset % slab_bytes_ + size > bytes_of(slab)) return false;
  const std::size_t size_class = class_for(slot_bytes);
  if (slabs_[slab].size_class == kClassesMax && !claim(size_class, slab)) return false;
  if (slabs_[slab].size_class != size_class) return false;
  const auto index = static_cast<std::uint32_t>(offset % slab_bytes_ / size);
  FreeIds& free = slabs_[slab].free;
  if (!free.has(index)) return false;
  free.remove(index);
  if (free.count() == 0) classes_[size_class].open.remove(slab);
  ++taken_slots_;
  return true;
}

void Slabs::give(SlotId slot) {
  const Spot spot = locate(slot);
  if (spot.slab == kNone || !taken(spot))
    throw Broken("slabs: slot " + std::to_string(slot) + " given back but not taken");
  Slab& slab = slabs_[spot.slab];
  Class& owner = classes_[slab.size_class];
  slab.free.add(spot.index);
  --taken_slots_;
  owner.open.add(spot.slab);
  if (slab.free.count() < slab.free.limit()) return;
  owner.open.remove(spot.slab);
  --owner.slabs;
  capacity_slots_ -= slab.free.limit();
  slab = Slab{};
  free_slabs_.add(spot.slab);
}

Slabs::Spot Slabs::locate(SlotId slot) const noexcept {
  const std::size_t offset = std::size_t{slot} * kPageBytes;
  const std::size_t slab = offset / slab_bytes_;
  if (slot == kNone || slab >= slabs_.size() || slabs_[slab].size_class == kClassesMax) return {};
  const std::size_t size = classes_[slabs_[slab].size_class].slot_bytes;
  const std::size_t index = offset % slab_bytes_ / size;
  if (offset % slab_bytes_ % size != 0 || index >= slabs_[slab].free.limit()) return {};
  return {static_cast<std::uint32_t>(slab), static_cast<std::uint32_t>(index)};
}

SlotId Slabs::slot_at(Spot spot) const noexcept {
  const std::size_t size = classes_[slabs_[spot.slab].size_class].slot_bytes;
  return static_cast<SlotId>((spot.slab * slab_bytes_ + spot.index * size) / kPageBytes);
}

void Slabs::check() const {
  std::vector<std::size_t> owned(classes_.size(), 0);
  std::size_t capacity = 0, free = 0;
  for (std::uint32_t s = 0; s < slabs_.size(); ++s) {
    const Slab& slab = slabs_[s];
    const bool unowned = slab.size_class == kClassesMax;
    if (free_slabs_.has(s) != unowned) throw Broken("slabs: slab " + std::to_string(s) + " is free and owned");
    if (unowned) continue;
    const Class& owner = classes_[slab.size_class];
    ++owned[slab.size_class];
    capacity += slab.free.limit();
    free += slab.free.count();
    if (slab.free.limit() * owner.slot_bytes > bytes_of(s)) throw Broken("slabs: a slot crosses its slab's end");
    if (slab.free.count() == slab.free.limit()) throw Broken("slabs: an empty slab is still owned");
    if (owner.open.has(s) != (slab.free.count() > 0)) throw Broken("slabs: open slabs disagree");
  }
  for (std::size_t c = 0; c < classes_.size(); ++c)
    if (owned[c] != classes_[c].slabs) throw Broken("slabs: slabs per class are off");
  if (capacity != capacity_slots_ || capacity - free != taken_slots_) throw Broken("slabs: slot counts are off");
}

}  // namespace kv
