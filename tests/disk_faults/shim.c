/* Preloaded into a program, it logs each call that opens, writes or changes a file below a folder, and makes one fail.
 *
 * DISK_FAULT_ROOT   the folder, as an absolute path without links
 * DISK_FAULT_LOG    file that gets a line "ROLE CALL PATH NTH" for each call; absent: nothing is logged
 * DISK_FAULT        "ROLE CALL PATH NTH ERRNO": the call that fails, and from then on all such calls of the process if
 *                   NTH ends with "+"; absent: nothing fails
 *
 * ROLE is rank0, supervisor0, ... under an MPI launcher, or else "main". PATH is relative to the folder, its numbers are
 * N and its long hexadecimal names H, so that it is the same in each run. NTH counts calls with this name and path in a
 * process, from 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define COUNTERS 512

static __thread int busy;
static struct {
  char key[256];
  int calls;
} counters[COUNTERS];

static void role_of_process(char *role, size_t size) {
  const char *rank = getenv("PMI_RANK");
  if (!rank) rank = getenv("OMPI_COMM_WORLD_RANK");
  char name[17] = "";
  prctl(PR_GET_NAME, name);
  if (!rank)
    snprintf(role, size, "main");
  else
    snprintf(role, size, "%s%s", strcmp(name, "rank-supervisor") ? "rank" : "supervisor", rank);
}

static void normalise(const char *path, char *out, size_t size) {
  size_t n = 0;
  while (*path && n + 2 < size) {
    size_t hex = strspn(path, "0123456789abcdef"), digits = strspn(path, "0123456789");
    if (hex >= 8 && strcspn(path, "0123456789") < hex) {
      out[n++] = 'H';
      path += hex;
    } else if (digits) {
      out[n++] = 'N';
      path += digits;
    } else {
      out[n++] = *path == ' ' ? '_' : *path;
      path++;
    }
  }
  out[n] = 0;
}

/* The absolute path without "." and doubled "/"; links are not followed. */
static int absolute(int folder, const char *path, char *out) {
  char base[PATH_MAX] = "";
  if (!path) return 0;
  if (path[0] != '/') {
    if (folder == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      char link[64];
      snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
      ssize_t length = readlink(link, base, sizeof base - 1);
      if (length < 0) return 0;
      base[length] = 0;
    }
    strncat(base, "/", sizeof base - strlen(base) - 1);
  }
  snprintf(out, PATH_MAX, "%.2000s%.2000s", base, path);
  return 1;
}

static int of_descriptor(int descriptor, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, out, PATH_MAX - 1);
  if (length < 0) return 0;
  out[length] = 0;
  return 1;
}

/* The error with which this call fails, or 0. */
static int error_of(const char *call, const char *path) {
  const char *root = getenv("DISK_FAULT_ROOT");
  if (!root || strncmp(path, root, strlen(root)) || path[strlen(root)] != '/') return 0;
  char relative[200], role[32], key[256];
  normalise(path + strlen(root) + 1, relative, sizeof relative);
  role_of_process(role, sizeof role);
  snprintf(key, sizeof key, "%s %s %s", role, call, relative);
  int slot = 0;
  while (slot < COUNTERS - 1 && counters[slot].key[0] && strcmp(counters[slot].key, key)) slot++;
  if (!counters[slot].key[0]) strcpy(counters[slot].key, key);
  int nth = __atomic_add_fetch(&counters[slot].calls, 1, __ATOMIC_SEQ_CST);
  const char *log = getenv("DISK_FAULT_LOG"), *fault = getenv("DISK_FAULT");
  if (log) {
    char line[320];
    int length = snprintf(line, sizeof line, "%s %d\n", key, nth);
    int descriptor = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor >= 0) {
      if (syscall(SYS_write, descriptor, line, length) < 0) abort();
      syscall(SYS_close, descriptor);
    }
  }
  size_t length = strlen(key);
  if (!fault || strncmp(fault, key, length) || fault[length] != ' ') return 0;
  char *end;
  int wanted = (int)strtol(fault + length + 1, &end, 10), and_later = *end == '+';
  return nth == wanted || (and_later && nth > wanted) ? atoi(end + and_later) : 0;
}

static int fails(const char *call, const char *path) {
  if (busy) return 0;
  busy = 1;
  int before = errno, error = error_of(call, path);
  errno = error ? error : before;
  busy = 0;
  return error != 0;
}

#define NEXT(function) static typeof(&function) next; if (!next) next = (typeof(&function))dlsym(RTLD_NEXT, #function)
#define AT(folder, path, call, failure)                                     \
  do {                                                                      \
    char full[PATH_MAX];                                                    \
    if (absolute(folder, path, full) && fails(call, full)) return failure;  \
  } while (0)
#define OF(descriptor, call, failure)                                             \
  do {                                                                            \
    char full[PATH_MAX];                                                          \
    if (of_descriptor(descriptor, full) && fails(call, full)) return failure;     \
  } while (0)
#define OPEN_CALL(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? "open-to-write" : "open-to-read")
#define MODE(flags, last)                                                        \
  mode_t mode = 0;                                                               \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                                         \
    va_list arguments;                                                           \
    va_start(arguments, last);                                                   \
    mode = va_arg(arguments, mode_t);                                            \
    va_end(arguments);                                                           \
  }

int open(const char *path, int flags, ...) {
  NEXT(open);
  MODE(flags, flags)
  AT(AT_FDCWD, path, OPEN_CALL(flags), -1);
  return next(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  NEXT(open64);
  MODE(flags, flags)
  AT(AT_FDCWD, path, OPEN_CALL(flags), -1);
  return next(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
  NEXT(openat);
  MODE(flags, flags)
  AT(folder, path, OPEN_CALL(flags), -1);
  return next(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
  NEXT(openat64);
  MODE(flags, flags)
  AT(folder, path, OPEN_CALL(flags), -1);
  return next(folder, path, flags, mode);
}
FILE *fopen(const char *path, const char *mode) {
  NEXT(fopen);
  AT(AT_FDCWD, path, strchr(mode, 'r') && !strchr(mode, '+') ? "open-to-read" : "open-to-write", NULL);
  return next(path, mode);
}
FILE *fopen64(const char *path, const char *mode) {
  NEXT(fopen64);
  AT(AT_FDCWD, path, strchr(mode, 'r') && !strchr(mode, '+') ? "open-to-read" : "open-to-write", NULL);
  return next(path, mode);
}
ssize_t write(int descriptor, const void *bytes, size_t count) {
  NEXT(write);
  OF(descriptor, "write", -1);
  return next(descriptor, bytes, count);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  NEXT(writev);
  OF(descriptor, "write", -1);
  return next(descriptor, parts, count);
}
ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t offset) {
  NEXT(pwrite);
  OF(descriptor, "write", -1);
  return next(descriptor, bytes, count, offset);
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
  NEXT(pwrite64);
  OF(descriptor, "write", -1);
  return next(descriptor, bytes, count, offset);
}
int ftruncate(int descriptor, off_t length) {
  NEXT(ftruncate);
  OF(descriptor, "truncate", -1);
  return next(descriptor, length);
}
int ftruncate64(int descriptor, off64_t length) {
  NEXT(ftruncate64);
  OF(descriptor, "truncate", -1);
  return next(descriptor, length);
}
int posix_fallocate64(int descriptor, off64_t offset, off64_t length) {
  NEXT(posix_fallocate64);
  OF(descriptor, "allocate", errno);
  return next(descriptor, offset, length);
}
int fsync(int descriptor) {
  NEXT(fsync);
  OF(descriptor, "fsync", -1);
  return next(descriptor);
}
int fdatasync(int descriptor) {
  NEXT(fdatasync);
  OF(descriptor, "fsync", -1);
  return next(descriptor);
}
int flock(int descriptor, int operation) {
  NEXT(flock);
  OF(descriptor, "lock", -1);
  return next(descriptor, operation);
}
int rename(const char *from, const char *to) {
  NEXT(rename);
  AT(AT_FDCWD, to, "rename", -1);
  return next(from, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  NEXT(renameat);
  AT(to_folder, to, "rename", -1);
  return next(from_folder, from, to_folder, to);
}
int link(const char *from, const char *to) {
  NEXT(link);
  AT(AT_FDCWD, to, "link", -1);
  return next(from, to);
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
  NEXT(linkat);
  AT(to_folder, to, "link", -1);
  return next(from_folder, from, to_folder, to, flags);
}
int symlink(const char *target, const char *path) {
  NEXT(symlink);
  AT(AT_FDCWD, path, "link", -1);
  return next(target, path);
}
int mkdir(const char *path, mode_t mode) {
  NEXT(mkdir);
  AT(AT_FDCWD, path, "mkdir", -1);
  return next(path, mode);
}
int unlink(const char *path) {
  NEXT(unlink);
  AT(AT_FDCWD, path, "unlink", -1);
  return next(path);
}
int unlinkat(int folder, const char *path, int flags) {
  NEXT(unlinkat);
  AT(folder, path, "unlink", -1);
  return next(folder, path, flags);
}
int rmdir(const char *path) {
  NEXT(rmdir);
  AT(AT_FDCWD, path, "unlink", -1);
  return next(path);
}
