// One logical stream of tokens over several files: plain text (bytes as tokens) or llm.c's .bin token files.
//
// The files are untrusted: every size and every id is checked, and a function that fails returns -1 with one line
// in err that says what was expected and what was found. Nothing is copied at open: files are mapped, and
// tokens_read converts on the fly. (A mapped file must not be shortened while in use: that is a SIGBUS.)
#ifndef TOKENS_H
#define TOKENS_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TOKENS_TEXT, TOKENS_U16, TOKENS_U32 };
enum { TOKENS_HEADER_BYTES = 1024, TOKENS_MAGIC_U16 = 20240520, TOKENS_MAGIC_U32 = 20240801 };

typedef struct {
    char *path;
    const uint8_t *map;
    size_t map_size;
    int kind;
    int64_t n_tokens;
    int64_t first;          // index of its first token in the stream
} TokenFile;

typedef struct {
    TokenFile *files;
    int n_files;
    int64_t n_tokens;
    int kind;
    int vocab;
    int eot;                // end of document; llm.c puts it before each document, and so do text files here
} TokenStream;

// A path with the identity of its file: two names (symlink, hard link, "./") of one file have equal dev and ino.
typedef struct { char *path; dev_t dev; ino_t ino; } TokenPath;
typedef struct { TokenPath *at; int n, cap; } TokenPaths;

// Formats one line into err (cut at errlen). Always returns -1, so that callers can return it.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline int tokens_error(char *err, size_t errlen, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    if (err && errlen) vsnprintf(err, errlen, fmt, ap);
    va_end(ap);
    return -1;
}

// Reads / writes a little-endian uint32 at any alignment, on any host.
static inline uint32_t tokens_load32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline void tokens_store32(uint8_t *p, uint32_t v) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}

// 1 if name ends with the given extension, else 0.
static inline int tokens_has_ext(const char *name, const char *ext) {
    size_t n = strlen(name), m = strlen(ext);
    return n >= m && !strcmp(name + n - m, ext);
}

// qsort order of TokenPath by bytes of the path; strcmp, because strcoll would make the order of the data depend
// on the locale.
static inline int tokens_path_order(const void *a, const void *b) {
    return strcmp(((const TokenPath *)a)->path, ((const TokenPath *)b)->path);
}

// Frees a list of paths and leaves it empty.
static inline void tokens_paths_free(TokenPaths *l) {
    for (int i = 0; i < l->n; i++) free(l->at[i].path);
    free(l->at);
    memset(l, 0, sizeof *l);
}

// Appends a copy of path with its identity. 0, or -1 if memory ran out.
static inline int tokens_paths_add(TokenPaths *l, const char *path, const struct stat *st, char *err, size_t errlen) {
    if (l->n == l->cap) {
        int cap = l->cap ? 2 * l->cap : 16;
        TokenPath *at = (TokenPath *)realloc(l->at, (size_t)cap * sizeof *at);
        if (!at) return tokens_error(err, errlen, "%s: out of memory listing files", path);
        l->at = at;
        l->cap = cap;
    }
    char *copy = strdup(path);
    if (!copy) return tokens_error(err, errlen, "%s: out of memory listing files", path);
    l->at[l->n].path = copy;
    l->at[l->n].dev = st->st_dev;
    l->at[l->n++].ino = st->st_ino;
    return 0;
}

// Appends the regular files of folder dir whose name ends in ext; hidden ones are left out, as glob does.
// Returns how many, or -1 if the folder cannot be read.
static inline int tokens_list_folder(TokenPaths *l, const char *dir, const char *ext, char *err, size_t errlen) {
    DIR *d = opendir(dir);
    if (!d) return tokens_error(err, errlen, "%s: cannot read the folder: %s", dir, strerror(errno));
    int found = 0;
    struct dirent *e;
    while (found >= 0 && (errno = 0, e = readdir(d))) {
        if (e->d_name[0] == '.' || !tokens_has_ext(e->d_name, ext)) continue;
        size_t size = strlen(dir) + strlen(e->d_name) + 2;
        char *path = (char *)malloc(size);
        if (!path) { found = tokens_error(err, errlen, "%s: out of memory listing files", dir); break; }
        snprintf(path, size, "%s%s%s", dir, tokens_has_ext(dir, "/") ? "" : "/", e->d_name);
        struct stat st;
        if (stat(path, &st))        // skipping it would silently train on less than was asked for
            found = tokens_error(err, errlen, "%s: cannot stat: %s", path, strerror(errno));
        else if (S_ISREG(st.st_mode))
            found = tokens_paths_add(l, path, &st, err, errlen) ? -1 : found + 1;
        free(path);
    }
    if (found >= 0 && !e && errno) found = tokens_error(err, errlen, "%s: cannot read the folder: %s", dir, strerror(errno));
    closedir(d);
    return found;
}

// Appends the regular files that one element of a spec (file, folder or glob pattern) stands for, sorted by name.
// 0, or -1 if there is none.
static inline int tokens_list_element(TokenPaths *l, const char *elem, char *err, size_t errlen) {
    struct stat st;
    int start = l->n;
    if (!stat(elem, &st)) {         // an existing name wins over its reading as a pattern
        if (S_ISREG(st.st_mode)) return tokens_paths_add(l, elem, &st, err, errlen);
        if (!S_ISDIR(st.st_mode)) return tokens_error(err, errlen, "%s: expected a regular file or a folder, found neither", elem);
        int n = tokens_list_folder(l, elem, ".txt", err, errlen);
        if (n == 0) n = tokens_list_folder(l, elem, ".bin", err, errlen);
        if (n < 0) return -1;
        if (n == 0) return tokens_error(err, errlen, "%s: expected *.txt or *.bin files in this folder, found none", elem);
    } else if (!strpbrk(elem, "*?[")) {
        return tokens_error(err, errlen, "%s: expected a file, a folder or a glob pattern, found none: %s", elem, strerror(errno));
    } else {
        glob_t g;
        memset(&g, 0, sizeof g);
        int rc = glob(elem, GLOB_NOSORT, NULL, &g), failed = 0;
        for (size_t i = 0; !rc && !failed && i < g.gl_pathc; i++)
            if (!stat(g.gl_pathv[i], &st) && S_ISREG(st.st_mode))
                failed = tokens_paths_add(l, g.gl_pathv[i], &st, err, errlen);
        globfree(&g);
        if (failed) return -1;
        if (rc && rc != GLOB_NOMATCH) return tokens_error(err, errlen, "%s: glob failed with code %d", elem, rc);
        if (l->n == start) return tokens_error(err, errlen, "%s: expected the pattern to match at least 1 file, found 0", elem);
    }
    qsort(l->at + start, (size_t)(l->n - start), sizeof *l->at, tokens_path_order);
    return 0;
}

// Appends the files of a comma-separated spec, in the order of its elements. 0, or -1.
static inline int tokens_list(TokenPaths *l, const char *spec, char *err, size_t errlen) {
    for (const char *p = spec; ; ) {
        size_t n = strcspn(p, ",");
        if (!n) return tokens_error(err, errlen, "\"%s\": expected file names separated by commas, found an empty name at byte %zu",
                                    spec, (size_t)(p - spec));
        char *elem = strndup(p, n);
        int failed = elem ? tokens_list_element(l, elem, err, errlen)
                          : tokens_error(err, errlen, "\"%s\": out of memory listing files", spec);
        free(elem);
        if (failed) return -1;
        if (!p[n]) return 0;
        p += n + 1;
    }
}

// Checks the header and the size of a mapped .bin file; sets f->kind and f->n_tokens, *vocab and *eot. 0, or -1.
static inline int tokens_parse_header(TokenFile *f, int *vocab, int *eot, char *err, size_t errlen) {
    if (f->map_size < TOKENS_HEADER_BYTES)
        return tokens_error(err, errlen, "%s: expected a header of %d bytes, found a file of %zu bytes", f->path,
                            TOKENS_HEADER_BYTES, f->map_size);
    int32_t h[5];
    for (int i = 0; i < 5; i++) h[i] = (int32_t)tokens_load32(f->map + 4 * i);
    if (h[0] != TOKENS_MAGIC_U16 && h[0] != TOKENS_MAGIC_U32)
        return tokens_error(err, errlen,
                            "%s: a token file starts with the int32 magic %d (uint16 tokens) or %d (uint32 tokens), found %" PRId32,
                            f->path, TOKENS_MAGIC_U16, TOKENS_MAGIC_U32, h[0]);
    int wide = h[0] == TOKENS_MAGIC_U32, version = wide ? 7 : 1, bytes = wide ? 4 : 2;
    f->kind = wide ? TOKENS_U32 : TOKENS_U16;
    if (h[1] != version)
        return tokens_error(err, errlen, "%s: expected version %d with magic %" PRId32 ", found %" PRId32, f->path, version, h[0], h[1]);
    if (h[2] < 1)
        return tokens_error(err, errlen, "%s: expected a token count of at least 1 in the header, found %" PRId32, f->path, h[2]);
    f->n_tokens = h[2];
    int64_t size = TOKENS_HEADER_BYTES + bytes * f->n_tokens;
    if ((uint64_t)f->map_size != (uint64_t)size)
        return tokens_error(err, errlen, "%s: expected %" PRId64 " bytes for %" PRId64 " tokens, found %zu", f->path, size,
                            f->n_tokens, f->map_size);
    *vocab = h[3] ? (int)h[3] : wide ? 128256 : 50257;
    *eot = h[3] ? (int)h[4] : wide ? 128000 : 50256;
    if (*vocab < 1 || *eot < 0 || *eot >= *vocab)
        return tokens_error(err, errlen, "%s: expected 0 <= eot < vocab in the header, found eot %d, vocab %d", f->path, *eot, *vocab);
    return 0;
}

// Maps the file at f->path and fills the rest of f but for f->first, and *vocab and *eot. 0, or -1; on failure
// f->map may be set, for tokens_close.
static inline int tokens_map_file(TokenFile *f, int *vocab, int *eot, char *err, size_t errlen) {
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return tokens_error(err, errlen, "%s: cannot open: %s", f->path, strerror(errno));
    struct stat st;
    int failed = 0, is_bin = tokens_has_ext(f->path, ".bin");
    void *map = MAP_FAILED;
    if (fstat(fd, &st))
        failed = tokens_error(err, errlen, "%s: cannot stat: %s", f->path, strerror(errno));
    else if (st.st_size <= 0)       // mmap refuses 0 bytes; say why, in the words of the kind of file
        failed = is_bin ? tokens_error(err, errlen, "%s: expected a header of %d bytes, found a file of 0 bytes", f->path,
                                       TOKENS_HEADER_BYTES)
                        : tokens_error(err, errlen, "%s: expected text of at least 1 byte, found 0 bytes", f->path);
    else if ((uint64_t)st.st_size > SIZE_MAX)
        failed = tokens_error(err, errlen, "%s: expected at most %zu bytes on this machine, found %" PRId64, f->path,
                              (size_t)SIZE_MAX, (int64_t)st.st_size);
    else if ((map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        failed = tokens_error(err, errlen, "%s: cannot map %" PRId64 " bytes: %s", f->path, (int64_t)st.st_size, strerror(errno));
    close(fd);                      // the mapping outlives it
    if (failed) return -1;
    f->map = (const uint8_t *)map;
    f->map_size = (size_t)st.st_size;
    if (is_bin) return tokens_parse_header(f, vocab, eot, err, errlen);
    f->kind = TOKENS_TEXT;
    f->n_tokens = (int64_t)st.st_size + 1;
    *vocab = 257;
    *eot = 256;
    return 0;
}

// Unmaps all files and frees s, leaving it zero. Closing a zero stream, or one twice, is harmless.
static inline void tokens_close(TokenStream *s) {
    for (int i = 0; i < s->n_files; i++) {
        if (s->files[i].map) munmap((void *)s->files[i].map, s->files[i].map_size);
        free(s->files[i].path);
    }
    free(s->files);
    memset(s, 0, sizeof *s);
}

// Maps the listed files one after the other into the zeroed stream s; takes over the paths of the list. 0, or -1
// if a file is bad or differs from the first one in kind, vocab or eot.
static inline int tokens_open_list(TokenStream *s, TokenPaths *l, char *err, size_t errlen) {
    static const char *const kinds[] = { "text", "uint16 tokens", "uint32 tokens" };
    s->files = (TokenFile *)calloc((size_t)l->n, sizeof *s->files);
    if (!s->files) return tokens_error(err, errlen, "%s: out of memory for %d files", l->at[0].path, l->n);
    for (int i = 0; i < l->n; i++) {
        TokenFile *f = &s->files[s->n_files++];
        int vocab = 0, eot = 0;
        f->path = l->at[i].path;
        l->at[i].path = NULL;
        if (tokens_map_file(f, &vocab, &eot, err, errlen)) return -1;
        if (!i) { s->kind = f->kind; s->vocab = vocab; s->eot = eot; }
        if (f->kind != s->kind || vocab != s->vocab || eot != s->eot)
            return tokens_error(err, errlen, "%s: expected %s, vocab %d, eot %d as in %s, found %s, vocab %d, eot %d", f->path,
                                kinds[s->kind], s->vocab, s->eot, s->files[0].path, kinds[f->kind], vocab, eot);
        f->first = s->n_tokens;
        s->n_tokens += f->n_tokens;
    }
    return 0;
}

// Opens the files of spec (comma-separated files, folders and glob patterns) less those of exclude (same syntax;
// NULL or "" for none) as one stream. A folder stands for its *.txt files or, having none, its *.bin files.
// Files are compared by identity, not by name: an excluded file is left out under any name, and a file that would
// be read twice is an error. 0, or -1 with s zero.
static inline int tokens_open(TokenStream *s, const char *spec, const char *exclude, char *err, size_t errlen) {
    TokenPaths in = { NULL, 0, 0 }, ex = { NULL, 0, 0 };
    memset(s, 0, sizeof *s);
    if (!spec) spec = "";
    if (!exclude) exclude = "";
    int failed = tokens_list(&in, spec, err, errlen);
    if (!failed && *exclude) failed = tokens_list(&ex, exclude, err, errlen);
    int kept = 0, listed = in.n;
    for (int i = 0; !failed && i < listed; i++) {
        TokenPath p = in.at[i];
        int j = 0, k = 0;
        while (j < ex.n && !(ex.at[j].dev == p.dev && ex.at[j].ino == p.ino)) j++;
        while (k < kept && !(in.at[k].dev == p.dev && in.at[k].ino == p.ino)) k++;
        if (j == ex.n && k < kept) {
            failed = tokens_error(err, errlen, "%s: expected each file once, found the same file as %s", p.path, in.at[k].path);
        } else if (j == ex.n) {     // swap, so that in.at still owns every path
            in.at[i] = in.at[kept];
            in.at[kept++] = p;
        }
    }
    if (!failed && !kept)
        failed = tokens_error(err, errlen, "%s: expected at least 1 file left after excluding %s, found 0 of %d", spec, exclude, listed);
    if (!failed) {
        TokenPaths keep = { in.at, kept, in.cap };
        failed = tokens_open_list(s, &keep, err, errlen);
    }
    if (failed) tokens_close(s);
    tokens_paths_free(&in);
    tokens_paths_free(&ex);
    return failed;
}

// Copies tokens [first, first+n) of the stream to out (n), across file boundaries. 0, or -1 if the range is not
// within the stream or an id is not below vocab; out is then undefined.
static inline int tokens_read(const TokenStream *s, int64_t first, int64_t n, int32_t *out, char *err, size_t errlen) {
    if (first < 0 || n < 0 || first > s->n_tokens || n > s->n_tokens - first)
        return tokens_error(err, errlen,
                            "%s: expected a range within the stream's %" PRId64 " tokens, found %" PRId64 " tokens from %" PRId64,
                            s->n_files ? s->files[0].path : "(closed stream)", s->n_tokens, n, first);
    if (!n) return 0;
    int lo = 0, hi = s->n_files;    // bisect for the last file that starts at or before first
    while (hi - lo > 1) {
        int mid = lo + (hi - lo) / 2;
        if (s->files[mid].first <= first) lo = mid; else hi = mid;
    }
    for (const TokenFile *f = s->files + lo; n > 0; f++) {
        int64_t at = first - f->first, m = f->n_tokens - at < n ? f->n_tokens - at : n;
        if (f->kind == TOKENS_TEXT) {
            for (int64_t i = 0; i < m; i++) out[i] = at + i ? f->map[at + i - 1] : s->eot;
        } else {
            int bytes = f->kind == TOKENS_U32 ? 4 : 2;
            const uint8_t *p = f->map + TOKENS_HEADER_BYTES + bytes * at;
            for (int64_t i = 0; i < m; i++, p += bytes) {
                uint32_t id = bytes == 4 ? tokens_load32(p) : (uint32_t)p[0] | (uint32_t)p[1] << 8;
                if (id >= (uint32_t)s->vocab)
                    return tokens_error(err, errlen, "%s: expected token ids below %d, found %" PRIu32 " at byte %" PRId64,
                                        f->path, s->vocab, id, (int64_t)(p - f->map));
                out[i] = (int32_t)id;
            }
        }
        first += m;
        out += m;
        n -= m;
    }
    return 0;
}

// Writes header and tokens, bytes per token, to f. 0, or -1 with errno.
static inline int tokens_write_body(FILE *f, const int32_t *tok, int64_t n, int bytes, int vocab, int eot) {
    uint8_t buf[4096];
    memset(buf, 0, TOKENS_HEADER_BYTES);
    tokens_store32(buf, bytes == 4 ? TOKENS_MAGIC_U32 : TOKENS_MAGIC_U16);
    tokens_store32(buf + 4, bytes == 4 ? 7 : 1);
    tokens_store32(buf + 8, (uint32_t)n);
    tokens_store32(buf + 12, (uint32_t)vocab);
    tokens_store32(buf + 16, (uint32_t)eot);
    if (fwrite(buf, 1, TOKENS_HEADER_BYTES, f) != TOKENS_HEADER_BYTES) return -1;
    for (int64_t i = 0; i < n; ) {
        size_t used = 0;
        for (; i < n && used + 4 <= sizeof buf; i++, used += (size_t)bytes) {
            uint8_t b[4];
            tokens_store32(b, (uint32_t)tok[i]);
            memcpy(buf + used, b, (size_t)bytes);
        }
        if (fwrite(buf, 1, used, f) != used) return -1;
    }
    return 0;
}

// Writes tok (n) as a token file: version 1 (uint16) when vocab <= 65536, else version 7 (uint32), with vocab and
// eot in the header. Name it *.bin, or tokens_open takes it for text. The file appears under its name only when it
// is whole and on disk. 0, or -1 with nothing changed.
static inline int tokens_write(const char *path, const int32_t *tok, int64_t n, int vocab, int eot, char *err, size_t errlen) {
    if (n < 1 || n > INT32_MAX)
        return tokens_error(err, errlen, "%s: expected 1 to %d tokens, found %" PRId64, path, INT32_MAX, n);
    if (vocab < 1 || eot < 0 || eot >= vocab)
        return tokens_error(err, errlen, "%s: expected 0 <= eot < vocab, found eot %d, vocab %d", path, eot, vocab);
    for (int64_t i = 0; i < n; i++)
        if (tok[i] < 0 || tok[i] >= vocab)
            return tokens_error(err, errlen, "%s: expected token ids from 0 to %d, found %" PRId32 " at index %" PRId64, path,
                                vocab - 1, tok[i], i);
    size_t size = strlen(path) + 32;
    char *tmp = (char *)malloc(size);
    if (!tmp) return tokens_error(err, errlen, "%s: out of memory", path);
    snprintf(tmp, size, "%s.tmp.%ld", path, (long)getpid());
    FILE *f = fopen(tmp, "wb");
    int failed = !f;
    if (f) {
        failed = tokens_write_body(f, tok, n, vocab <= 65536 ? 2 : 4, vocab, eot) || fflush(f) || fsync(fileno(f));
        int e = errno;              // of the first failure, not of the clean-up
        if (fclose(f) && !failed) { failed = 1; e = errno; }
        if (!failed && rename(tmp, path)) { failed = 1; e = errno; }
        if (failed) unlink(tmp);
        errno = e;
    }
    if (failed) tokens_error(err, errlen, "%s: cannot write: %s", path, strerror(errno));
    free(tmp);
    return failed ? -1 : 0;
}

#endif
