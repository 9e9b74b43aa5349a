// The disk pool: which node's bytes lie in which record, which segment is filled, and which is given up.
// One thread (the daemon's loop) owns it; bytes move on the mover's threads, and pump() takes what has ended.
//
//   segment   CREATING → FREE → OPENING → FILLING → SEALING → SEALED → EVACUATING → FREE
//             any → BROKEN when the disk refuses; tried again by resume()
//
//   OPENING     its header, with a new sequence and nonce, is written and synced: the old life is over. Then it
//               waits for its turn; `spare` of them, so that nobody waits for one. close() seals it, or the next
//               start would read all of it to find nothing.
//   FILLING     one at a time takes records
//   SEALING     its last writes end, sync, footer, sync
//   EVACUATING  what is worth keeping is copied to the segment that is FILLING and synced there; then it is FREE
//
// A record is readable from the moment its write has ended and its parent's record is readable. What survives
// is prefix-shaped: a record is given up only together with all below it, except for rot (and bytes that an
// evacuation could not move), which leaves a hole that a later save fills: the bytes behind it are good, and
// its next save makes them reachable again.
//
// Who stays. When there is no room for another segment, the oldest one that nobody reads is evacuated, a slice
// of it in each pump(). Of its records those stay (are written again) that were used since they were written
// or have a pinned node at or below, and those above any of them; at most `reinsert_share` of a segment, the
// most recently used first; pinned ones in any case. "Used" is touch(). A later write of something below is
// not: a chain that crosses the end of a segment while it is saved would be written twice, and whoever
// continues a chain has found it before, which is a use. After a restart nobody knows what was used: then a
// block with younger ones below it counts as used, or one old head would take the whole cache with it.
// What leaves has nothing below it that was used since: stamps never decrease towards the root.
//
// Less capacity than before. What the files hold is taken up, and then segments are evacuated, in the background, one
// after the other; each that is FREE and no spare is removed with its file, until the rest fits. What was used only
// by blocks of other segments that have to leave does not count as used; the rest is written again whatever
// `reinsert_share` says. Until the end no file is made and write() accepts nothing: what it took would have to leave
// again.
//
// What a crash may cut (LAWS H31). (1) A segment's header is synced before its first record is written.
// (2) A header is written over only when every record that was copied away is synced where it is now; until
// then the node goes on with the old record. (3) A footer is written only after a sync of the records. (4) What an
// unsealed segment held when it was taken up may be in the page cache only, and a copy of what is on the medium
// elsewhere: before a sync of every such segment nothing is evacuated, and no SEALED one becomes FREE. So what a
// flush has acknowledged is found again, whatever was under way.
//
// A disk that fails. A record that cannot be written is dead, and others go on. What cannot be opened, sealed
// or synced is BROKEN: its records stay readable, and no segment is opened, created or evacuated before
// resume(), so that a disk that refuses everything does not cost what is on it. A file that cannot be made
// (ENOSPC) only ends the making of files until resume(): the tier goes on with the segments that it has.
//
// Memory: 24 B for every id of the index, 16 B a record, 128 B a segment.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "disk_directory.h"
#include "disk_nodes.h"
#include "disk_pool_types.h"
#include "disk_segment.h"
#include "disk_survey.h"
#include "fd.h"
#include "index.h"
#include "mover.h"
#include "usage.h"
#include "zeroed.h"

namespace kv {

class DiskPool final : public Place {
 public:
  // Invalid when the directory has room for fewer than three segments (one is filled, one is opened, one keeps
  // what was written), or an option is out of its range. Nothing is begun before the first pump().
  DiskPool(Index& index, std::shared_ptr<Arena> arena, std::shared_ptr<DiskDirectory> directory,
           std::unique_ptr<Mover> mover, DiskOptions options);
  ~DiskPool();  // close(0)
  DiskPool(const DiskPool&) = delete;
  DiskPool& operator=(const DiskPool&) = delete;

  // Once, before anything else, unless the directory is new: takes up what a survey of this directory found,
  // joined by keys: a record whose chain does not reach its root is dropped. Roots are made as needed. The index
  // may know some of the nodes already. About 0.6 us a record. take_stored() does not tell of them.
  DiskAdopted adopt(const DiskSurvey& survey);

  // Readable while pump() has something to do. (An epoll of the mover's and of one of ours: pump() does its work
  // in slices of about a millisecond, and asks to be called again when something is left.)
  int eventfd() const noexcept { return epoll_.get(); }
  std::string_view io() const noexcept { return mover_->disk_kind(); }

  // ---- questions -------------------------------------------------------------------------------------------
  // Leading blocks of the walk that were in the host pool when it was made, or are readable here now.
  std::size_t match(const Walk& walk) const noexcept;
  std::vector<std::uint8_t> readable(std::span<const NodeId> nodes) const;
  // The blocks above and including node that are neither readable nor being written here, up to the nearest
  // that is, chain order. (A hole further up is not among them.)
  std::vector<NodeId> missing(NodeId node) const;
  // Every readable node of the segments [start, start + most), for snapshots; `coming`: those too that are on their
  // way, or wait for their parent.
  std::vector<NodeId> nodes(std::size_t start = 0, std::size_t most = kNone, bool coming = false) const;
  std::vector<std::uint8_t> present(std::span<const NodeId> nodes) const;  // readable or coming
  std::size_t segments() const noexcept { return segments_.size(); }  // positions, of which some may be empty
  DiskCounts counts() const noexcept;
  std::size_t memory_bytes() const noexcept;
  void check() const;  // Broken names the first law that does not hold. Looks at everything: 0.1 us a node

  // ---- acts ------------------------------------------------------------------------------------------------
  // These nodes, a chain or a part of one, were used now. About a store each; those of the chain that are
  // higher up, once per segment that is opened.
  void touch(std::span<const NodeId> nodes);

  struct Begun {
    std::uint64_t job = 0;      // 0: nothing was begun
    std::size_t accepted = 0;   // leading nodes; the others wait for room, ask again after a pump()
  };
  // Writes blocks that are READY in these slots, a chain: the parent of the first is readable or being written
  // here, or is a root. The caller keeps the slots as they are until the job's last event. Nodes that are here
  // already or on their way count as accepted, and no event of this job names them.
  // Invalid, and nothing was begun, on a node without such a parent (ask missing() again), a slot that is not
  // READY, unsummed (`checked`) or another block's, a block larger than a segment, more than kKeysMax nodes.
  Begun write(std::span<const NodeId> nodes, std::span<const SlotId> slots, const SlotFormat& format);
  // Reads records into FILLING slots. Every node must be readable here (Invalid), at most kKeysMax. Full when
  // too many jobs are out.
  std::uint64_t read(std::span<const NodeId> nodes, std::span<const SlotId> slots, const SlotFormat& format);
  // What of a read has not been submitted to the disk ends as `failed`.
  void cancel(std::uint64_t job);
  // An event kFlushed when everything accepted so far is on the medium (error != 0: not all of it is).
  std::uint64_t flush();
  // Takes what the mover has done, and lets every life cycle go on.
  std::vector<DiskEvent> pump();
  // BROKEN segments, and whatever else had failed, are tried again: a BROKEN segment without records is FREE,
  // one with records is sealed. (Without direct I/O the kernel forgets what it could not write, and no later
  // sync proves anything: then records of a segment whose sync has failed are given up.)
  void resume();

  // Bytes nobody wants any more, together with all below: O(what is there). False if there were none. They are gone
  // for good only when their segment is: see forget() of the store for what a restart may bring back.
  bool forget(NodeId node);
  // Whose a root is, and how many bytes of records an account may have. Nothing is refused here: see trim().
  void claim(NodeId root, Account account);
  void set_limit(Account account, std::size_t bytes) { usage_.set_limit(account, bytes); }
  const Usage& usage() const noexcept { return usage_; }
  // Forgets blocks of an account, leaves first, until it could have `bytes` more within its limit: those of the oldest
  // segments first, and what was used since it was written only when nothing else is left. What is pinned stays, and
  // what is above `keep`. Looks at one slice of records in a call; true when there is room.
  bool trim(Account account, std::size_t bytes, NodeId keep = kNone);

  // Where the log stands: all records made so far lie before it, every later one at or behind it.
  struct Mark {
    std::uint64_t sequence = 0;  // of a segment
    std::uint32_t page = 0;
    friend auto operator<=>(const Mark&, const Mark&) = default;
  };
  Mark mark() const;
  // Behind everything that forget() took: evacuations carry records past a mark, or were just doing so.
  Mark forgotten() const { return forgotten_; }
  // Lower than it there is no record: marks below it have nothing more to say.
  std::uint64_t oldest_sequence() const;
  // After a restart: forgets what each of these roots had before its mark. Returns how many were readable. One look at
  // every record, however many roots there are.
  std::size_t forget_before(const std::unordered_map<NodeId, Mark>& roots);
  // Rot: this record alone.
  bool drop(NodeId node);

  std::vector<Key> take_stored();   // keys that came since the last call and are here now
  std::vector<Key> take_removed();  // that left, and are not back
  DiskDropped take_dropped();

  // Seals what is being filled or is open if that is possible within the time, then ends the mover, waiting for what
  // the disk has under way. Nothing is found here any more; the last events can still be taken.
  void close(double timeout_s);

  // ---- Place -----------------------------------------------------------------------------------------------
  void pinned(NodeId node) override;
  void unpinned(NodeId node) override;
  std::uint32_t holders(std::uint32_t start, std::uint32_t most, const HolderOf& each) const override;
  bool reads(NodeId node) const override { return nodes_.readable(node); }

 private:
  static constexpr std::size_t kChoresMax = 1024;  // jobs of the mover kept for the life of segments
  friend struct DiskPoolProbe;  // tests reach move() and the laws

  struct Job {
    DiskEvent::Kind kind = DiskEvent::Kind::kWritten;
    MoveId move = 0;
    SlotFormat format;
    std::vector<NodeId> nodes;
    std::vector<RecordRef> refs;
    std::size_t open = 0;  // nodes without an end
    // Ended since the last event, by their position in `nodes`.
    std::vector<std::uint32_t> ok, corrupt, failed;
    int error = 0;
    double seconds = 0;
    bool listed = false;  // in changed_
  };
  struct Work {  // what a job of the mover is for
    enum class Kind : std::uint8_t { kJob, kMoves, kStep, kSync, kNames };
    Kind kind = Kind::kJob;
    std::uint64_t job = 0;      // kJob: ours
    std::size_t first = 0;      // kMoves: position of the first one
    std::uint32_t segment = 0;  // kStep (of its life) and kSync
  };
  struct Flush {
    std::uint64_t job = 0;
    std::size_t writes = 0;  // jobs accepted before it that have not ended
    bool asked = false;      // its syncs are wanted
    int error = 0;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> syncs;  // segment, number
  };
  struct Waiting {  // a HELD record's place in its job
    std::uint64_t job = 0;
    std::uint32_t at = 0;
  };
  struct Move {  // of an evacuation
    std::uint32_t from = kNone;
    RecordRef to;
    bool ok = false;
  };
  struct Evacuation {
    enum class Phase : std::uint8_t { kMark, kChoose, kTrim, kCopy, kWait, kSync, kEnd };
    Phase phase = Phase::kMark;
    std::uint32_t segment = kNone;
    std::uint32_t used_since = 0;      // stamps above it are of what stays
    std::vector<NodeId> pinned;        // when it began; those not marked yet
    Zeroed<std::uint64_t> marks;       // a bit for every node, set: pinned at or below, at some time since it began
    std::uint32_t at = 0;              // next record, or next of `chosen`
    std::vector<std::uint32_t> chosen; // records that stay
    std::vector<std::uint32_t> over;   // that would, but are too many
    std::vector<Move> moves;
    std::size_t open = 0;              // of them, under way
    std::vector<std::pair<std::uint32_t, std::uint64_t>> syncs;
    bool compacts = false;             // all that lives moves: see disk_pool_trim.cc
    std::uint32_t pages_left = 0;      // of what then moves, its part of a footer included
    bool keep = false;                 // something could not be moved: the segment stays
    bool failed = false;               // because the disk refused
  };
  enum class For : std::uint8_t { kSave, kMove };
  struct Trimming {            // how far trim() has come with an account
    std::uint64_t after = 0;   // segments up to this sequence hold nothing more to take
    std::uint32_t seen = 0;    // records of the one behind it, from its end
    bool found = false;        // something, in this round
    bool used_too = false;
  };

  // disk_pool.cc
  void require_open() const;
  const SegmentFile& file(std::uint32_t segment) const { return directory_->segments()[segment]; }
  int fd(std::uint32_t segment) const { return file(segment).fd.get(); }
  SegmentHeader header_of(std::uint32_t segment) const;
  void again() noexcept;
  void took(const Notice& notice);
  void took_job(std::uint64_t id, const Notice& notice);
  void resolve(std::uint64_t id, std::uint32_t at, MoveStatus status);
  void report_jobs();
  void seal_everything();
  void release_everything();

  // disk_records.cc
  DiskRecord& record(RecordRef ref) { return segments_[ref.segment].records[ref.record]; }
  const DiskRecord& record(RecordRef ref) const { return segments_[ref.segment].records[ref.record]; }
  const SlotFormat& format_of(RecordRef ref) const { return formats_[record(ref).format]; }
  std::uint32_t pages_of(const DiskRecord& record) const { return record_pages(formats_[record.format]); }
  bool fits(std::uint32_t pages) const noexcept { return kHeaderPages + pages + footer_pages(1) <= segment_pages_; }
  std::uint32_t allocate(std::uint32_t pages, For what);
  RecordRef append(std::uint32_t segment, const DiskRecord& record);
  RecordHeader header_of(NodeId node, const Key& root, RecordRef ref) const;
  RecordAt place_of(RecordRef ref) const;
  void release(RecordRef ref);
  void publish(NodeId node);
  void kill(NodeId node);
  void lose(NodeId node, std::size_t& count);
  bool kill_tree(NodeId top, std::size_t& count, std::size_t& steps);

  // disk_pool_trim.cc
  std::uint32_t next_written(std::uint64_t after) const noexcept;
  std::uint32_t compactable() const noexcept;

  // disk_pool_write.cc
  void require_blocks(std::span<const NodeId> nodes, std::span<const SlotId> slots, const SlotFormat& format) const;
  void require_chain(std::span<const NodeId> nodes) const;
  void require_saved(std::span<const NodeId> nodes, std::span<const SlotId> slots, const SlotFormat& format) const;
  bool crowded() const noexcept { return works_.size() + kChoresMax > Mover::kJobsMax; }
  std::uint64_t begin(Job job);
  void written(std::uint64_t id, std::uint32_t at, MoveStatus status);
  void settle(NodeId node, std::uint64_t id, std::uint32_t at);
  void read_ended(std::uint64_t id, std::uint32_t at, MoveStatus status);
  void ask_syncs(Flush& flush);
  void step_flushes();

  // disk_pool_life.cc
  void move(std::uint32_t segment, SegmentState to);
  bool maintain();
  bool can_create() const noexcept;
  bool proven() const noexcept;
  std::size_t spares() const noexcept;
  std::size_t spare_target() const noexcept;
  void count_room() noexcept;
  void create();
  void open_ahead();
  bool begin_filling();
  void recycle();
  void remove(std::uint32_t segment);
  void sync_names();
  void took_names(const Notice& notice);
  void seal(std::uint32_t segment);
  void sealed(std::uint32_t segment);
  void advance(std::uint32_t segment);
  void write_footer(std::uint32_t segment);
  void step(std::uint32_t segment, MoveId move);
  void took_step(std::uint32_t segment, const Notice& notice);
  void await_sync(std::uint32_t segment, SegmentStep step);
  void sync_if_wanted(std::uint32_t segment);
  void took_sync(std::uint32_t segment, const Notice& notice);
  void broken(std::uint32_t segment, int error);
  void fail(int error, DiskEvent::Kind kind = DiskEvent::Kind::kFailed);

  // disk_pool_evict.cc
  bool wants_evacuation() const noexcept;
  std::uint32_t victim() const noexcept;
  std::uint32_t leaving_age() const;
  void begin_evacuation();
  bool step_evacuation();
  std::size_t mark_chain(NodeId pinned) noexcept;
  bool marked(NodeId node) const noexcept;
  void mark_pinned(std::size_t& steps);
  void choose(std::size_t& steps);
  void split_by_budget();
  void trim(std::size_t& steps);
  void copy(std::size_t& steps);
  bool copy_one(std::uint32_t from, std::vector<RelocateOrder>& orders, std::size_t& steps);
  void took_moves(std::size_t first, const Notice& notice);
  void moved(Move& move, MoveStatus status, int error);
  void sync_moves();
  void switch_over();
  void end_evacuation();

  // disk_pool_adopt.cc
  void take_up_segments(const DiskSurvey& survey, DiskAdopted& out);
  void take_up_records(const DiskSurvey& survey, DiskAdopted& out);
  NodeId take_up(RecordRef ref, const FooterEntry& entry, DiskAdopted& out);
  NodeId parent_of(const FooterEntry& entry, DiskAdopted& out);

  // disk_pool_check.cc
  void check_segment(std::uint32_t segment) const;
  void check_record(RecordRef ref) const;

  Index& index_;
  std::shared_ptr<Arena> arena_;
  std::shared_ptr<DiskDirectory> directory_;
  std::unique_ptr<Mover> mover_;
  DiskOptions options_;
  std::uint32_t segment_pages_ = 0;  // no smaller one is filled
  Fd again_, epoll_;
  bool adopted_ = false, closed_ = false;

  DiskNodes nodes_;
  DiskFormats formats_;
  Usage usage_;  // records, copies of an evacuation not counted
  std::unordered_map<Account, Trimming> trimming_;
  std::vector<DiskSegment> segments_;                       // by position in the directory
  std::array<std::set<std::uint32_t>, kSegmentStates> in_;  // positions by state
  std::uint32_t filling_ = kNone;
  std::vector<std::uint32_t> emptied_;                      // may have become FREE
  std::vector<std::uint32_t> misfits_;                      // FREE, of another size than new ones
  std::uint64_t sequence_ = 0;                              // of the newest opened segment
  Mark forgotten_;                                          // see forgotten()
  bool forgetting_ = false;                                 // while forget() runs
  std::uint32_t clock_ = 0;                                 // even; uses are stamped clock_ + 1
  std::vector<std::uint32_t> unlinked_;                     // their files' names may come back
  std::vector<std::uint32_t> unlinking_;                    // no more, when the sync of names that is under way ends
  std::size_t room_ = 0;                                    // for so many new files
  bool over_ = false;                                       // the files are larger than the capacity
  std::size_t file_bytes_max_ = ~std::size_t{0};            // they never get larger than this again
  bool stopped_ = false, creation_stopped_ = false;         // until resume()
  bool stuck_ = false;                                      // nothing can be evacuated
  bool pins_ended_ = false;                                 // since an evacuation began
  std::optional<Evacuation> evacuation_;

  std::uint64_t next_job_ = 1;
  std::unordered_map<std::uint64_t, Job> jobs_;
  std::unordered_map<MoveId, Work> works_;
  std::unordered_map<NodeId, Waiting> held_;
  std::vector<std::uint64_t> changed_;  // jobs with something to tell
  std::vector<Flush> flushes_;
  std::vector<DiskEvent> events_;

  std::size_t readable_ = 0, live_bytes_ = 0, writing_ = 0;
  std::size_t write_bytes_ = 0;  // accepted, and the mover has not ended them
  std::vector<Key> stored_, removed_;
  DiskDropped dropped_;
};

}  // namespace kv
