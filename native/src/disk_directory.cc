#include "disk_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "disk_pages.h"
#include "pieces.h"

namespace kv {
namespace {

constexpr char kManifestName[] = "kvstore.disk";
constexpr char kManifestNew[] = "kvstore.disk.new";  // until it is whole
constexpr char kLockName[] = "lock";
constexpr std::size_t kLockBytesMax = 16;  // a process id and a newline
constexpr int kOpenThreads = 8;            // an open and a small read each: the disk's latency, not its speed
constexpr std::size_t kOtherFiles = 256;   // descriptors that the rest of the process needs

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::string segment_name(std::uint32_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "segment-%06u.kvs", number);
  return name;
}

std::optional<std::uint32_t> segment_number(const std::string& name) {
  std::uint32_t number = 0;
  constexpr std::size_t kDigits = 8;  // where they begin
  if (name.size() <= kDigits) return std::nullopt;
  std::from_chars(name.data() + kDigits, name.data() + name.size(), number);
  if (number >= kSegmentsMax || name != segment_name(number)) return std::nullopt;
  return number;
}

// What lies in a directory.
struct Names {
  bool manifest = false;
  std::vector<std::uint32_t> segments;
  std::string strange;  // one that nobody expects in a directory that is still to become ours
};

bool is_lock(int directory) {
  struct stat info{};
  return ::fstatat(directory, kLockName, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode) &&
         info.st_size <= static_cast<off_t>(kLockBytesMax);
}

Names list(int directory, const std::string& path) {
  // A description of its own: reading moves its offset, and closedir() closes it.
  Fd fd(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  DIR* stream = fd ? ::fdopendir(fd.get()) : nullptr;
  if (stream == nullptr) fail(path + ": cannot list it");
  fd.release();
  const std::unique_ptr<DIR, int (*)(DIR*)> closing(stream, ::closedir);
  Names names;
  for (errno = 0; const dirent* entry = ::readdir(stream); errno = 0) {
    const std::string name = entry->d_name;
    const auto number = segment_number(name);
    if (number) names.segments.push_back(*number);
    if (name == kManifestName) names.manifest = true;
    // lost+found: the top of an ext4 file system.
    const bool expected = name == "." || name == ".." || name == "lost+found" || name == kManifestName ||
                          name == kManifestNew || (name == kLockName && is_lock(directory));
    if (!expected) names.strange = name;
  }
  if (errno != 0) fail(path + ": cannot list it");
  std::sort(names.segments.begin(), names.segments.end());
  return names;
}

// EINVAL: file systems that keep their names safe in another way know no sync of a directory.
void sync_names(int directory, const std::string& path) {
  if (::fsync(directory) != 0 && errno != EINVAL) fail(path + ": cannot sync it");
}

StoreId random_id() {
  StoreId id;
  if (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) fail("getrandom");
  return id;
}

// Whoever wrote it may be about to write its id, or be gone: 0 if there is none.
pid_t holder(int lock) {
  char text[kLockBytesMax] = {};
  const ssize_t n = ::pread(lock, text, sizeof text, 0);
  pid_t pid = 0;
  if (n > 0) std::from_chars(text, text + n, pid);
  return pid;
}

std::string held_by(pid_t pid) {
  if (pid == ::getpid()) return "this process uses it already; every trust group needs a directory of its own";
  const std::string who = pid > 0 ? "another daemon (pid " + std::to_string(pid) + ")" : "another daemon";
  return who + " uses it; stop that one first, or choose another directory";
}

// Many systems give 1,024 by default and allow a hundred times as many.
void allow_files(std::size_t files, const std::string& path) {
  const rlim_t needed = files + kOtherFiles;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) fail("getrlimit");
  if (limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed)
    throw Invalid(path + ": its segments need " + std::to_string(needed) + " open files, but the limit is " +
                  std::to_string(limit.rlim_max) + "; raise LimitNOFILE / ulimit -n, or segment_bytes");
  limit.rlim_cur = needed;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) fail("setrlimit: RLIMIT_NOFILE");
}

}  // namespace

std::shared_ptr<DiskDirectory> DiskDirectory::open(Options options) {
  std::shared_ptr<DiskDirectory> directory(new DiskDirectory(std::move(options)));
  directory->check_options();
  directory->open_directory();
  directory->is_ours();  // before anything is written there
  directory->take_lock();
  if (!directory->is_ours()) directory->make_manifest();
  directory->read_manifest();
  directory->open_segments();
  directory->remove_unfinished();
  return directory;
}

void DiskDirectory::check_options() const {
  const std::string& path = options_.path;
  const std::size_t capacity = options_.capacity_bytes, segment = options_.segment_bytes;
  if (path.empty() || path.find('\0') != std::string::npos) throw Invalid("path: must be a directory's name");
  if (capacity == 0) return;
  if (segment % kPageBytes != 0 || segment < kSegmentBytesMin || segment > kSegmentBytesMax)
    throw Invalid("segment_bytes: must be a multiple of 4 KiB in [1 MiB, 1 GiB], got " + std::to_string(segment));
  if (capacity < segment)
    throw Invalid("capacity_bytes: " + std::to_string(capacity) + " has no room for one segment of " +
                  std::to_string(segment) + " bytes");
  if (capacity / segment > kSegmentsMax)
    throw Invalid("capacity_bytes: would be more than " + std::to_string(kSegmentsMax) + " segments of " +
                  std::to_string(segment) + " bytes; raise segment_bytes");
}

// ---- the directory and who holds it ------------------------------------------------------------------------

void DiskDirectory::open_directory() {
  const std::string& path = options_.path;
  const bool made = options_.create && ::mkdir(path.c_str(), 0700) == 0;
  if (options_.create && !made && errno != EEXIST) fail(path + ": cannot make this directory");
  // The path may lead through links, as its owner likes; nothing inside does.
  directory_ = Fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory_ && errno == ENOENT) throw Invalid(path + ": does not exist");
  if (!directory_ && errno == ENOTDIR) throw Invalid(path + ": is not a directory");
  if (!directory_) fail(path + ": cannot open this directory");
  struct stat info{};
  if (::fstat(directory_.get(), &info) != 0) fail(path);
  if ((info.st_mode & S_IWOTH) != 0)
    throw Invalid(path + ": anyone may write to it; chmod it to 700, or choose a directory below it, to be made");
  if (!made) return;
  // Best effort: a parent that may only be passed through cannot be opened.
  const Fd parent(::openat(directory_.get(), "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent) sync_names(parent.get(), path + "/..");
}

// Whether it has a manifest. Invalid when it has none and must not get one.
bool DiskDirectory::is_ours() const {
  const std::string& path = options_.path;
  const Names names = list(directory_.get(), path);
  if (names.manifest) return true;
  if (!names.segments.empty())
    throw Invalid(path + ": holds segments but no kvstore.disk; put that file back, or choose another directory");
  if (!names.strange.empty())
    throw Invalid(path + ": holds other files (" + names.strange + ") and no kvstore.disk; choose an empty directory");
  if (!options_.create) throw Invalid(path + ": holds no kvstore.disk, so it is no directory of this store");
  return false;
}

void DiskDirectory::take_lock() {
  exists(kLockName);  // and is a file
  lock_ = open_file(kLockName, O_RDWR | O_CREAT);
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail(path_of(kLockName) + ": cannot lock it");
    throw Invalid(options_.path + ": " + held_by(holder(lock_.get())));
  }
  // For the message above. A full disk must not keep anyone from its blocks, so a failure only costs the number.
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(lock_.get(), 0) != 0 || ::pwrite(lock_.get(), pid.data(), pid.size(), 0) < 0) errno = 0;
}

// ---- files in it -------------------------------------------------------------------------------------------

// Invalid if something else than a file has the name: a pipe would hang whoever opens it, a link leads elsewhere.
bool DiskDirectory::exists(const std::string& name) const {
  struct stat info{};
  if (::fstatat(directory_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    fail(path_of(name));
  }
  if (!S_ISREG(info.st_mode)) throw Invalid(path_of(name) + ": is not a regular file; remove it");
  return true;
}

Fd DiskDirectory::open_file(const std::string& name, int flags) const {
  Fd fd(::openat(directory_.get(), name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!fd && errno == EINVAL && (flags & O_DIRECT) != 0) {
    // Some kernels make the file before they look at the flag.
    if ((flags & O_EXCL) != 0) ::unlinkat(directory_.get(), name.c_str(), 0);
    refuse_direct();
  }
  if (!fd) fail(path_of(name) + ": cannot open it");
  return fd;
}

int DiskDirectory::direct_flag() const noexcept { return options_.direct ? O_DIRECT : 0; }

void DiskDirectory::refuse_direct() const {
  throw Invalid(options_.path + ": its file system refuses O_DIRECT in units of 4 KiB; choose a directory on ext4 or "
                "XFS, or set nvme.direct = false");
}

void DiskDirectory::make_manifest() {
  const PageBuffer page(1);
  encode(Manifest{kDiskVersion, random_id()}, page.data());
  if (exists(kManifestNew) && ::unlinkat(directory_.get(), kManifestNew, 0) != 0)  // cut short before
    fail(path_of(kManifestNew) + ": cannot remove it");
  const Fd fd = open_file(kManifestNew, O_WRONLY | O_CREAT | O_EXCL | direct_flag());
  if (const int error = write_pages(fd.get(), 0, page.data(), 1); error != 0) {
    ::unlinkat(directory_.get(), kManifestNew, 0);
    if (error == EINVAL && options_.direct) refuse_direct();
    errno = error;
    fail(path_of(kManifestNew) + ": cannot write it");
  }
  if (::fsync(fd.get()) != 0) fail(path_of(kManifestNew) + ": cannot sync it");
  if (::renameat(directory_.get(), kManifestNew, directory_.get(), kManifestName) != 0)
    fail(path_of(kManifestName) + ": cannot be made");
  sync_names(directory_.get(), options_.path);
}

void DiskDirectory::read_manifest() {
  exists(kManifestName);
  const Fd fd = open_file(kManifestName, O_RDONLY | direct_flag());
  const PageBuffer page(1);
  const std::string path = path_of(kManifestName);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) fail(path);
  Manifest manifest;
  const bool sized = info.st_size == static_cast<off_t>(kPageBytes);
  const int error = sized ? read_pages(fd.get(), 0, page.data(), 1) : 0;
  if (error == EINVAL && options_.direct) refuse_direct();
  if (error != 0) {
    errno = error;
    fail(path + ": cannot read it");
  }
  if (!sized || !decode(page.data(), manifest))
    throw Invalid(path + ": is damaged or not ours; put it back as it was, or choose another directory");
  if (manifest.version != kDiskVersion)
    throw Invalid(path + ": says format version " + std::to_string(manifest.version) + ", this program knows " +
                  std::to_string(kDiskVersion) + "; choose another directory, or run the program that wrote it");
  id_ = manifest.store;
}

// ---- segments ----------------------------------------------------------------------------------------------

void DiskDirectory::open_segments() {
  const std::vector<std::uint32_t> numbers = list(directory_.get(), options_.path).segments;
  const std::size_t planned = options_.capacity_bytes == 0 ? 0 : options_.capacity_bytes / options_.segment_bytes;
  allow_files(std::max(numbers.size(), planned), options_.path);
  segments_.resize(numbers.size());
  for_pieces(kOpenThreads, numbers.size(), [&](std::size_t i) { segments_[i] = open_segment(numbers[i]); });
}

SegmentFile DiskDirectory::open_segment(std::uint32_t number) const {
  const std::string name = segment_name(number);
  exists(name);
  SegmentFile file;
  file.number = number;
  file.fd = open_file(name, O_RDWR | direct_flag());
  struct stat info{};
  if (::fstat(file.fd.get(), &info) != 0) fail(path_of(name));
  const auto bytes = static_cast<std::size_t>(info.st_size);
  // More than 16 TiB cannot be told, and is no segment anyway.
  file.pages = static_cast<std::uint32_t>(std::min<std::size_t>(round_up(bytes, kPageBytes) / kPageBytes, kNone));
  if (bytes % kPageBytes != 0 || file.pages < kSegmentPagesMin || file.pages > kSegmentPagesMax) return file;
  const PageBuffer page(1);
  SegmentHeader header;
  // A page that cannot be read is as good as one that was never written: its segment is to be made again.
  if (read_pages(file.fd.get(), 0, page.data(), 1) != 0 || !decode(page.data(), header)) return file;
  // A copy of another segment, or one of another directory, tells the truth about something else.
  if (header.store != id_ || header.segment != number || header.pages != file.pages) return file;
  file.header = header;
  file.usable = true;
  return file;
}

void DiskDirectory::remove_unfinished() {
  const std::size_t before = segments_.size();
  std::size_t all = bytes();
  std::erase_if(segments_, [&](const SegmentFile& file) {
    if (file.usable || options_.capacity_bytes == 0 || all <= options_.capacity_bytes) return false;
    const std::string name = segment_name(file.number);
    if (::unlinkat(directory_.get(), name.c_str(), 0) != 0) fail(path_of(name) + ": cannot remove it");
    all -= file.bytes();
    return true;
  });
  removed_ = before - segments_.size();
  if (removed_ > 0) sync_names(directory_.get(), options_.path);
}

std::size_t DiskDirectory::bytes() const noexcept {
  std::size_t n = 0;
  for (const SegmentFile& file : segments_) n += file.bytes();
  return n;
}

bool DiskDirectory::over_capacity() const noexcept {
  return options_.capacity_bytes > 0 && bytes() > options_.capacity_bytes;
}

bool DiskDirectory::room_for_another() const noexcept {
  const auto files = std::count_if(segments_.begin(), segments_.end(), [](const auto& file) { return bool(file.fd); });
  return options_.capacity_bytes > 0 && bytes() + options_.segment_bytes <= options_.capacity_bytes &&
         files < static_cast<std::ptrdiff_t>(kSegmentsMax);
}

std::uint32_t DiskDirectory::add() {
  if (!room_for_another()) throw Broken("disk directory: add() without room for another segment");
  std::vector<bool> taken(kSegmentsMax);
  for (const SegmentFile& file : segments_)
    if (file.fd) taken[file.number] = true;
  segments_.emplace_back();  // first, so that nothing can fail once there is a file
  SegmentFile& file = segments_.back();
  for (std::uint32_t number = 0; number < kSegmentsMax; ++number) {
    if (taken[number]) continue;
    const std::string name = segment_name(number);
    file.fd = Fd(::openat(directory_.get(), name.c_str(),
                          O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | direct_flag(), 0600));
    file.number = number;
    if (file.fd || errno != EEXIST) break;  // somebody has put a file there: it stays
  }
  if (!file.fd) {
    const std::string path = path_of(segment_name(file.number));
    segments_.pop_back();
    fail(path + ": cannot make it");
  }
  file.pages = static_cast<std::uint32_t>(options_.segment_bytes / kPageBytes);
  return static_cast<std::uint32_t>(segments_.size() - 1);
}

void DiskDirectory::discard(std::uint32_t position) noexcept {
  SegmentFile& file = segments_[position];
  if (!file.fd) return;
  char name[32];
  std::snprintf(name, sizeof name, "segment-%06u.kvs", file.number);
  // A name that cannot be taken away must at least not keep the room.
  if (::unlinkat(directory_.get(), name, 0) != 0 && ::ftruncate(file.fd.get(), 0) != 0) errno = 0;
  file = SegmentFile{};
}

}  // namespace kv
