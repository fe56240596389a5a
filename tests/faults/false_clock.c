/* Loaded before everything else: the wall clock runs ahead by as many seconds as the file
 * FAULTS_CLOCK says (one int64, mapped, so a change is seen at once), and the machine seems to have
 * been started as much later: the kernel counts "btime" in /proc/stat back from the wall clock.
 * Monotonic clocks are true. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long long *offset_s;

__attribute__((constructor)) static void find_file(void)
{
    const char *path = getenv("FAULTS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        offset_s = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *where)
{
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (where)
        *where = precise.tv_sec;
    return precise.tv_sec;
}

/* What /proc/stat says when the clock is off; -1 if it cannot be had. */
static int false_stat(void)
{
    int file = (int)syscall(SYS_openat, AT_FDCWD, "/proc/stat", O_RDONLY | O_CLOEXEC, 0);
    FILE *lines = file < 0 ? NULL : fdopen(file, "r");
    if (!lines)
        return -1;
    int copy = memfd_create("stat", MFD_CLOEXEC);
    char *line = NULL;
    size_t size = 0;
    long long started_at;
    while (copy >= 0 && getline(&line, &size, lines) > 0) {
        if (sscanf(line, "btime %lld", &started_at) == 1)
            dprintf(copy, "btime %lld\n", started_at + *offset_s);
        else
            dprintf(copy, "%s", line);
    }
    free(line);
    fclose(lines);
    if (copy >= 0)
        lseek(copy, 0, SEEK_SET);
    return copy;
}

static int open_any(int directory, const char *path, int flags, mode_t mode)
{
    if (offset_s && strcmp(path, "/proc/stat") == 0)
        return false_stat();
    return (int)syscall(SYS_openat, directory, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest)
{
    int makes_a_file = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;
    return makes_a_file ? va_arg(rest, mode_t) : 0;
}

#define REPLACE_OPEN(name)                                                  \
    int name(const char *path, int flags, ...)                              \
    {                                                                       \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        int file = open_any(AT_FDCWD, path, flags, mode_of(flags, rest));   \
        va_end(rest);                                                       \
        return file;                                                        \
    }
#define REPLACE_OPENAT(name)                                                \
    int name(int directory, const char *path, int flags, ...)               \
    {                                                                       \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        int file = open_any(directory, path, flags, mode_of(flags, rest));  \
        va_end(rest);                                                       \
        return file;                                                        \
    }

REPLACE_OPEN(open)
REPLACE_OPEN(open64)
REPLACE_OPENAT(openat)
REPLACE_OPENAT(openat64)
