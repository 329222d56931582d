// Token ids to text and text to ids: bytes (the default), or the table of an llm.c tokenizer.bin.
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct {
    int vocab;
    int eot;
    int bytes_mode;
    char **tok;             // (vocab) the bytes of each token, in one block of memory that starts at tok[0]
    uint8_t *len;           // (vocab) their lengths, 1 to 255
} Tokenizer;

enum { TOKENIZER_HEADER_BYTES = 1024, TOKENIZER_MAGIC = 20240328, TOKENIZER_GPT2_EOT = 50256 };

// Formats one line into err (cut at errlen). Always returns -1, so that callers can return it.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static inline int tokenizer_error(char *err, size_t errlen, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    if (err && errlen) vsnprintf(err, errlen, fmt, ap);
    va_end(ap);
    return -1;
}

// Frees t and leaves it zero; harmless on a zero one.
static inline void tokenizer_free(Tokenizer *t) {
    if (t->tok) free(t->tok[0]);
    free(t->tok);
    free(t->len);
    memset(t, 0, sizeof *t);
}

// Zeroes t and allocates its arrays for vocab tokens and bytes of text. 0, or -1 with t zero if memory ran out.
static inline int tokenizer_alloc(Tokenizer *t, int vocab, size_t bytes) {
    memset(t, 0, sizeof *t);
    t->vocab = vocab;
    t->tok = (char **)calloc((size_t)vocab, sizeof *t->tok);
    t->len = (uint8_t *)calloc((size_t)vocab, 1);
    if (t->tok) t->tok[0] = (char *)malloc(bytes);
    if (t->tok && t->len && t->tok[0]) return 0;
    tokenizer_free(t);
    return -1;
}

// The byte tokenizer: ids 0..255 are the bytes, 256 is the end of document. 0, or -1 if memory ran out.
static inline int tokenizer_bytes(Tokenizer *t) {
    if (tokenizer_alloc(t, 257, 2 * 257)) return -1;
    t->eot = 256;
    t->bytes_mode = 1;
    char *text = t->tok[0];
    for (int i = 0; i < 257; i++) {
        t->tok[i] = text + 2 * i;
        t->tok[i][0] = (char)(uint8_t)i;    // of 256 too, but decode never shows the text of eot
        t->tok[i][1] = 0;
        t->len[i] = 1;
    }
    return 0;
}

// Reads tokenizer.bin from f, which holds size bytes. 0, or -1; t is zero or must be freed.
static inline int tokenizer_load(Tokenizer *t, FILE *f, int64_t size, const char *path, char *err, size_t errlen) {
    uint8_t raw[TOKENIZER_HEADER_BYTES];
    uint32_t h[4];
    if (fread(raw, 1, sizeof raw, f) != sizeof raw)
        return tokenizer_error(err, errlen, "%s: expected a header of %d bytes, found a file of %" PRId64 " bytes", path,
                               TOKENIZER_HEADER_BYTES, size);
    for (int i = 0; i < 4; i++)
        h[i] = (uint32_t)raw[4 * i] | (uint32_t)raw[4 * i + 1] << 8 | (uint32_t)raw[4 * i + 2] << 16 | (uint32_t)raw[4 * i + 3] << 24;
    if (h[0] != TOKENIZER_MAGIC)
        return tokenizer_error(err, errlen, "%s: a tokenizer file starts with the uint32 magic %d, found %" PRIu32, path,
                               TOKENIZER_MAGIC, h[0]);
    if (h[1] != 1 && h[1] != 2)
        return tokenizer_error(err, errlen, "%s: expected version 1 or 2, found %" PRIu32, path, h[1]);
    int64_t body = size - TOKENIZER_HEADER_BYTES;
    if (h[2] < 1 || h[2] > INT32_MAX || 2 * (int64_t)h[2] > body)   // before any memory is asked for
        return tokenizer_error(err, errlen,
                               "%s: expected a vocabulary of 1 to %" PRId64 " tokens in %" PRId64 " bytes, found %" PRIu32,
                               path, body / 2, size, h[2]);
    uint32_t eot = h[1] == 2 ? h[3] : (uint32_t)TOKENIZER_GPT2_EOT;
    if (eot >= h[2])
        return tokenizer_error(err, errlen, "%s: expected an eot id below the vocabulary size %" PRIu32 ", found %" PRIu32,
                               path, h[2], eot);
    if ((uint64_t)body > SIZE_MAX || tokenizer_alloc(t, (int)h[2], (size_t)body))
        return tokenizer_error(err, errlen, "%s: out of memory for %" PRIu32 " tokens", path, h[2]);
    t->eot = (int)eot;
    char *text = t->tok[0];
    if (fread(text, 1, (size_t)body, f) != (size_t)body)
        return tokenizer_error(err, errlen, "%s: cannot read: expected %" PRId64 " bytes after the header", path, body);
    int64_t at = 0;
    for (int i = 0; i < t->vocab; i++) {
        int len = at < body ? (uint8_t)text[at] : 0;
        if (len < 1 || len > body - at - 1)
            return tokenizer_error(err, errlen,
                                   "%s: expected token %d of %d to be a length of 1 to 255 and as many bytes at byte %" PRId64
                                   ", found length %d and %" PRId64 " bytes left in the file", path, i, t->vocab,
                                   at + TOKENIZER_HEADER_BYTES, len, body - at > 0 ? body - at - 1 : (int64_t)0);
        t->tok[i] = text + at;              // length + bytes becomes bytes + NUL, in place
        t->len[i] = (uint8_t)len;
        memmove(t->tok[i], text + at + 1, (size_t)len);
        t->tok[i][len] = 0;
        at += len + 1;
    }
    if (at != body)
        return tokenizer_error(err, errlen, "%s: expected %" PRId64 " bytes for %d tokens, found %" PRId64, path,
                               at + TOKENIZER_HEADER_BYTES, t->vocab, size);
    return 0;
}

// Opens an llm.c tokenizer.bin: 256 uint32 of header, then per token one length byte and that many bytes, and
// nothing after the last. 0, or -1 with t zero.
static inline int tokenizer_open(Tokenizer *t, const char *path, char *err, size_t errlen) {
    struct stat st;
    memset(t, 0, sizeof *t);
    FILE *f = fopen(path, "rb");
    if (!f) return tokenizer_error(err, errlen, "%s: cannot open: %s", path, strerror(errno));
    int failed;
    if (fstat(fileno(f), &st)) failed = tokenizer_error(err, errlen, "%s: cannot stat: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode)) failed = tokenizer_error(err, errlen, "%s: expected a regular file, found another kind", path);
    else failed = tokenizer_load(t, f, (int64_t)st.st_size, path, err, errlen);
    fclose(f);
    if (failed) tokenizer_free(t);
    return failed;
}

// Sets *s to the text of a token (which may hold any byte) and returns its length; eot reads "<|endoftext|>".
// -1 if there is no such id; *s is then "".
static inline int tokenizer_decode(const Tokenizer *t, int id, const char **s) {
    *s = "";
    if (id < 0 || id >= t->vocab) return -1;
    *s = id == t->eot ? "<|endoftext|>" : t->tok[id];
    return id == t->eot ? (int)strlen(*s) : t->len[id];
}

typedef struct { const uint8_t *s; int len, id; } TokenizerEntry;

// qsort order by text, a prefix before what it begins; of equal texts the lowest id comes first.
static inline int tokenizer_entry_order(const void *a, const void *b) {
    const TokenizerEntry *x = (const TokenizerEntry *)a, *y = (const TokenizerEntry *)b;
    int c = memcmp(x->s, y->s, (size_t)(x->len < y->len ? x->len : y->len));
    if (!c) c = x->len - y->len;
    return c ? c : x->id - y->id;
}

// The number of the n sorted entries, all equal in their first k bytes, whose byte k is below c (one that ends at k
// counts as below everything).
static inline int tokenizer_below(const TokenizerEntry *e, int n, int k, int c) {
    int lo = 0, hi = n;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (e[mid].len <= k || e[mid].s[k] < c) lo = mid + 1; else hi = mid;
    }
    return lo;
}

// Encodes text (n bytes) to out (max ids) and returns the count, or -1 if some byte has no token, max is too small
// or memory ran out. Bytes: exact. With a table: greedy longest match, which is NOT the order of GPT-2's BPE merges:
// the ids decode to the same text but may differ from those the model was trained on. Text never yields eot.
static inline int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, int32_t *out, size_t max) {
    const uint8_t *p = (const uint8_t *)text;
    if (t->bytes_mode) {
        if (n > max) return -1;
        for (size_t i = 0; i < n; i++) out[i] = p[i];
        return (int64_t)n;
    }
    TokenizerEntry *all = (TokenizerEntry *)malloc(((size_t)t->vocab + 1) * sizeof *all);
    if (!all) return -1;
    int entries = 0;
    for (int i = 0; i < t->vocab; i++) {
        if (i == t->eot) continue;
        all[entries].s = (const uint8_t *)t->tok[i];
        all[entries].len = t->len[i];
        all[entries++].id = i;
    }
    qsort(all, (size_t)entries, sizeof *all, tokenizer_entry_order);
    int64_t count = 0;
    while (n > 0 && count >= 0) {
        const TokenizerEntry *e = all;      // e[0..m) begin with the k bytes of text read so far
        int m = entries, id = -1, best = 0;
        for (int k = 0; (size_t)k < n && m > 0; ) {
            int lo = tokenizer_below(e, m, k, p[k]), hi = tokenizer_below(e, m, k, p[k] + 1);
            e += lo;
            m = hi - lo;
            k++;
            if (m > 0 && e[0].len == k) { id = e[0].id; best = k; }
        }
        if (id < 0 || (size_t)count >= max) { count = -1; break; }
        out[count++] = id;
        p += best;
        n -= (size_t)best;
    }
    free(all);
    return count;
}

// Length of the valid UTF-8 sequence at s (n >= 1 bytes), or 0 if there is none or it is a control character other
// than \n and \t. Not valid: overlong forms, surrogates, beyond U+10FFFF.
static inline size_t utf8_printable(const uint8_t *s, size_t n) {
    if (s[0] < 0x80) return (s[0] >= 0x20 && s[0] != 0x7f) || s[0] == '\n' || s[0] == '\t';
    size_t len = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || n < len) return 0;
    for (size_t i = 1; i < len; i++) if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4
                                                            && s[1] > 0x8f)) return 0;
    return s[0] == 0xc2 && s[1] < 0xa0 ? 0 : len;   // U+0080..U+009F are control characters as well
}

// Prints n bytes of text that may be anything a model has made up: printable UTF-8 as it is, all other bytes as
// \xHH, so that a terminal is never sent an escape sequence. A character must not be split over two calls.
static inline void print_utf8_safe(FILE *f, const char *s, size_t n) {
    const uint8_t *p = (const uint8_t *)s;
    while (n > 0) {
        size_t len = utf8_printable(p, n);
        if (len) fwrite(p, 1, len, f);
        else { fprintf(f, "\\x%02X", p[0]); len = 1; }
        p += len;
        n -= len;
    }
}

#endif
