// The slab arena: which slots exist. An arena is cut into slabs; a slab is free or belongs to one size class
// (slots of one size, rounded to pages); an empty slab is free again at once and can change its class.
//
// Slabs start at multiples of slab_bytes, so none crosses a 1 GiB border when slab_bytes divides 1 GiB
// (io_uring registers buffers of at most 1 GiB). The last slab may be partial.
// Slots are handed out in ascending order, slab after slab, so that one save is few runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "free_ids.h"
#include "types.h"

namespace kv {

inline constexpr std::size_t kClassesMax = 64;  // slot sizes in use at once

class Slabs {
 public:
  struct Spot {
    std::uint32_t slab = kNone;
    std::uint32_t index = 0;  // of the slot in its slab
  };

  Slabs(std::size_t capacity_bytes, std::size_t slab_bytes);

  // The class for slots of that many bytes; made if absent. Invalid if it does not fit a slab, or if
  // kClassesMax other sizes have slots. A class that owns no slab may be replaced by a later call.
  std::size_t class_for(std::size_t slot_bytes);
  // The class if it exists, or kClassesMax.
  std::size_t find_class(std::size_t slot_bytes) const noexcept;

  // Next free slot of the class, claiming a free slab if needed, or kNone. O(1).
  SlotId take(std::size_t size_class);
  // Takes that very slot, of slots of that size; false if its slab has slots of another size, or it does not
  // start one, or is taken. For an arena that outlived its daemon.
  bool adopt(SlotId slot, std::size_t slot_bytes);
  // Gives a taken slot back. O(1).
  void give(SlotId slot);
  // Where a slot lies, or slab kNone if no slot of a class starts there.
  Spot locate(SlotId slot) const noexcept;
  SlotId slot_at(Spot spot) const noexcept;
  bool taken(Spot spot) const noexcept { return !slabs_[spot.slab].free.has(spot.index); }

  std::size_t slabs() const noexcept { return slabs_.size(); }
  std::size_t free_slabs() const noexcept { return free_slabs_.count(); }
  std::size_t slab_bytes() const noexcept { return slab_bytes_; }
  std::size_t classes() const noexcept { return classes_.size(); }
  std::size_t slot_bytes(std::size_t size_class) const noexcept { return classes_[size_class].slot_bytes; }
  // Class of a slab, or kClassesMax while it is free; slots in it.
  std::size_t class_of(std::uint32_t slab) const noexcept { return slabs_[slab].size_class; }
  std::size_t slots_in(std::uint32_t slab) const noexcept { return slabs_[slab].free.limit(); }
  std::size_t free_slots() const noexcept { return capacity_slots_ - taken_slots_; }
  std::size_t capacity_slots() const noexcept { return capacity_slots_; }
  std::size_t taken_slots() const noexcept { return taken_slots_; }

  void check() const;

 private:
  struct Slab {
    std::size_t size_class = kClassesMax;
    FreeIds free;              // free slots of a slab that has a class
  };
  struct Class {
    std::size_t slot_bytes = 0;
    std::size_t slabs = 0;
    FreeIds open;              // its slabs with a free slot
    std::uint32_t slab = 0;    // where it handed out last,
    std::uint32_t index = 0;   // and the index after that slot
  };

  std::size_t bytes_of(std::uint32_t slab) const noexcept;
  bool claim(std::size_t size_class, std::uint32_t slab);

  std::size_t capacity_bytes_;
  std::size_t slab_bytes_;
  std::vector<Slab> slabs_;
  std::vector<Class> classes_;
  FreeIds free_slabs_;
  std::size_t capacity_slots_ = 0;  // in classes that exist now
  std::size_t taken_slots_ = 0;
};

}  // namespace kv
