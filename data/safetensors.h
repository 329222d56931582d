// JSON reading, the safetensors file format, and a file checksum; C99 that also compiles as C++.
//
// A safetensors file is: an 8-byte little-endian header length N, N bytes of JSON, then raw
// tensor data. Files come from elsewhere, so every length and offset is checked before use;
// errors are one line in `err` (what was expected, what was found). Assumes a little-endian
// 64-bit POSIX host. A file that another process shortens while it is mapped still raises SIGBUS.
#ifndef HYSCALE_SAFETENSORS_H
#define HYSCALE_SAFETENSORS_H

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
#define JSON_MAX_DEPTH 64
#define ST_MAX_DIMS 8
#define ST_MAX_HEADER 100000000
#define ST_MAX_INT 9007199254740991LL // 2^53-1: JSON numbers are doubles, exact up to here

typedef struct Json {
    int type;
    double num;         // the number; 0 or 1 for a bool
    char *str;          // the string, UTF-8
    int n;              // elements of an array or object
    struct Json *items; // the elements
    char **keys;        // an object's keys, parallel to items
} Json;

typedef struct { const char *text; size_t len, pos; char *err; size_t errlen; } JsonReader;

// Formats one line into err (control characters become '?', so a hostile name cannot forge
// further lines). Always returns -1.
__attribute__((format(printf, 3, 4)))
static inline int json_set_error(char *err, size_t errlen, const char *fmt, ...) {
    va_list ap;
    if (err == NULL || errlen == 0) return -1;
    va_start(ap, fmt);
    vsnprintf(err, errlen, fmt, ap);
    va_end(ap);
    for (; *err; err++) if ((unsigned char)*err < 0x20 || *err == 0x7f) *err = '?';
    return -1;
}

// The next byte of the text, or -1 at its end.
static inline int json_peek(const JsonReader *r) {
    return r->pos < r->len ? (unsigned char)r->text[r->pos] : -1;
}

// Reports that `what` was expected at the reader's position. Always returns -1.
static inline int json_expected(JsonReader *r, const char *what) {
    char found[32];
    int c = json_peek(r);
    if (c < 0) snprintf(found, sizeof found, "the end of the text");
    else snprintf(found, sizeof found, c >= 0x20 && c < 0x7f ? "'%c'" : "byte 0x%02x", c);
    return json_set_error(r->err, r->errlen, "expected %s at byte %zu, found %s", what, r->pos, found);
}

static inline void json_skip_space(JsonReader *r) {
    int c;
    while ((c = json_peek(r)) == ' ' || c == '\t' || c == '\n' || c == '\r') r->pos++;
}

// Length (1..4) of the valid UTF-8 sequence at p, or 0 if it is invalid (overlong, surrogate,
// above U+10FFFF, or cut off by `left`).
static inline int json_utf8_length(const char *s, size_t left) {
    const unsigned char *p = (const unsigned char *)s;
    int i, n = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : p[0] < 0xF5 ? 4 : 0;
    if ((size_t)n > left) return 0;
    for (i = 1; i < n; i++) if ((p[i] & 0xC0) != 0x80) return 0;
    if (n > 2 && ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] >= 0xA0) ||
                  (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] >= 0x90))) return 0;
    return n;
}

// Reads the XXXX of \uXXXX. Returns the code unit, or -1.
static inline int json_hex4(JsonReader *r) {
    int i, v = 0;
    for (i = 0; i < 4; i++, r->pos++) {
        int c = json_peek(r);
        if (c < 0 || !isxdigit(c)) return json_expected(r, "four hexadecimal digits after \\u");
        v = v * 16 + (c <= '9' ? c - '0' : (c | 32) - 'a' + 10);
    }
    return v;
}

// Decodes \uXXXX (the reader is just after the u; a surrogate pair takes both escapes) to UTF-8
// at out. Returns the bytes written, or -1. U+0000 is refused: it would end the C string early.
static inline int json_unicode_escape(JsonReader *r, char *out) {
    int i, n, low, cp = json_hex4(r);
    if (cp < 0) return -1;
    if (cp == 0) return json_expected(r, "no \\u0000 in a string");
    if (cp >= 0xD800 && cp < 0xE000) {
        if (cp >= 0xDC00 || r->len - r->pos < 2 || memcmp(r->text + r->pos, "\\u", 2) != 0)
            return json_expected(r, "a surrogate pair, high half then low half,");
        r->pos += 2;
        if ((low = json_hex4(r)) < 0) return -1;
        if (low < 0xDC00 || low > 0xDFFF) return json_expected(r, "the low half of a surrogate pair");
        cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
    }
    n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (i = n - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 63));
    out[0] = (char)(n == 1 ? cp : (0xF00 >> n & 0xFF) | cp); // n leading ones, then the top bits
    return n;
}

// Decodes the string body up to the closing quote at `end` into out, which has room for the raw
// length (no escape is shorter than its UTF-8). Returns 0, or -1.
static inline int json_unescape(JsonReader *r, size_t end, char *out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    while (r->pos < end) {
        int n, c = json_peek(r);
        const char *hit;
        if (c < 0x20) return json_expected(r, "no raw control character in a string");
        if (c != '\\') {
            if ((n = json_utf8_length(r->text + r->pos, end - r->pos)) == 0) return json_expected(r, "valid UTF-8");
            memcpy(out, r->text + r->pos, (size_t)n);
            out += n; r->pos += (size_t)n;
            continue;
        }
        r->pos++;
        c = json_peek(r);
        if (c == 'u') {
            r->pos++;
            if ((n = json_unicode_escape(r, out)) < 0) return -1;
            out += n;
        } else {
            if (c <= 0 || (hit = strchr(from, c)) == NULL) return json_expected(r, "one of \"\\/bfnrtu after a backslash");
            *out++ = to[hit - from];
            r->pos++;
        }
    }
    *out = '\0';
    return 0;
}

// Reads a quoted string. Returns it malloc'ed, or NULL with the error set.
static inline char *json_string(JsonReader *r) {
    size_t end;
    char *out;
    if (json_peek(r) != '"') { json_expected(r, "a string in double quotes"); return NULL; }
    for (end = ++r->pos; end < r->len && r->text[end] != '"'; end++) if (r->text[end] == '\\') end++;
    if (end >= r->len) { r->pos = r->len; json_expected(r, "a closing double quote"); return NULL; }
    out = (char *)malloc(end - r->pos + 1);
    if (out == NULL) { json_set_error(r->err, r->errlen, "out of memory reading JSON"); return NULL; }
    if (json_unescape(r, end, out) != 0) { free(out); return NULL; }
    r->pos = end + 1;
    return out;
}

// Skips one or more digits. Returns 0, or -1 if there is none.
static inline int json_digits(JsonReader *r) {
    if (!isdigit(json_peek(r))) return json_expected(r, "a digit");
    while (isdigit(json_peek(r))) r->pos++;
    return 0;
}

// Reads a number by JSON's grammar, which is stricter than strtod's (no hex, inf, nan, "+1", "01").
static inline int json_number(JsonReader *r, double *num) {
    char buf[128]; // strtod needs a NUL after the number, which the text need not have
    size_t begin = r->pos;
    if (json_peek(r) == '-') r->pos++;
    if (json_peek(r) == '0') r->pos++;
    else if (json_digits(r) != 0) return -1;
    if (json_peek(r) == '.') { r->pos++; if (json_digits(r) != 0) return -1; }
    if (json_peek(r) == 'e' || json_peek(r) == 'E') {
        r->pos++;
        if (json_peek(r) == '+' || json_peek(r) == '-') r->pos++;
        if (json_digits(r) != 0) return -1;
    }
    if (r->pos - begin >= sizeof buf)
        return json_set_error(r->err, r->errlen, "expected a number of at most %zu characters at byte %zu, found %zu",
                              sizeof buf - 1, begin, r->pos - begin);
    memcpy(buf, r->text + begin, r->pos - begin);
    buf[r->pos - begin] = '\0';
    *num = strtod(buf, NULL);
    if (isinf(*num)) return json_set_error(r->err, r->errlen, "expected a number within the range of a double at byte %zu, found %s", begin, buf);
    return 0;
}

// Appends a null element (and a NULL key) to j. Capacity is implied by n: it doubles whenever n
// is a power of two. Returns 0, or -1 if memory ran out.
static inline int json_append(JsonReader *r, Json *j) {
    size_t n = (size_t)j->n, cap = n ? 2 * n : 1;
    if ((n & (n - 1)) == 0) { // also true for 0
        Json *items = (Json *)realloc(j->items, cap * sizeof(Json));
        if (items != NULL) j->items = items;
        if (items != NULL && j->type == JSON_OBJECT) {
            char **keys = (char **)realloc(j->keys, cap * sizeof(char *));
            if (keys != NULL) j->keys = keys; else items = NULL;
        }
        if (items == NULL) return json_set_error(r->err, r->errlen, "out of memory reading JSON");
    }
    memset(&j->items[n], 0, sizeof(Json));
    if (j->type == JSON_OBJECT) j->keys[n] = NULL;
    j->n++;
    return 0;
}

static inline int json_compare_keys(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

// Refuses duplicate keys. Sorts, since comparing all pairs of a large vocabulary would be slow.
static inline int json_check_keys(JsonReader *r, const Json *j) {
    int i, status = 0;
    char **sorted;
    if (j->type != JSON_OBJECT || j->n < 2) return 0;
    sorted = (char **)malloc((size_t)j->n * sizeof(char *));
    if (sorted == NULL) return json_set_error(r->err, r->errlen, "out of memory reading JSON");
    memcpy(sorted, j->keys, (size_t)j->n * sizeof(char *));
    qsort(sorted, (size_t)j->n, sizeof(char *), json_compare_keys);
    for (i = 1; i < j->n && status == 0; i++)
        if (strcmp(sorted[i - 1], sorted[i]) == 0)
            status = json_set_error(r->err, r->errlen, "expected distinct keys in the object ending at byte %zu, found duplicate key \"%.100s\"", r->pos, sorted[i]);
    free(sorted);
    return status;
}

// Reads one value into the zeroed *j. Returns 0, or -1 with *j safe to clear.
static inline int json_value(JsonReader *r, Json *j, int depth) {
    static const struct { const char *text; int type; double num; } words[] = {
        {"null", JSON_NULL, 0}, {"false", JSON_BOOL, 0}, {"true", JSON_BOOL, 1}};
    int c, i, close;
    json_skip_space(r);
    c = json_peek(r);
    if (c == '"') { j->type = JSON_STRING; return (j->str = json_string(r)) == NULL ? -1 : 0; }
    if (c == '-' || isdigit(c)) { j->type = JSON_NUMBER; return json_number(r, &j->num); }
    for (i = 0; i < 3; i++) {
        size_t n = strlen(words[i].text);
        if (r->len - r->pos < n || memcmp(r->text + r->pos, words[i].text, n) != 0) continue;
        j->type = words[i].type; j->num = words[i].num; r->pos += n;
        return 0;
    }
    if (c != '[' && c != '{') return json_expected(r, "a JSON value");
    if (depth >= JSON_MAX_DEPTH) return json_expected(r, "at most 64 nested levels"); // bounds the stack
    j->type = c == '[' ? JSON_ARRAY : JSON_OBJECT;
    close = c == '[' ? ']' : '}';
    r->pos++;
    json_skip_space(r);
    while (json_peek(r) != close || j->n > 0) {
        if (json_append(r, j) != 0) return -1;
        if (j->type == JSON_OBJECT) {
            json_skip_space(r);
            if ((j->keys[j->n - 1] = json_string(r)) == NULL) return -1;
            json_skip_space(r);
            if (json_peek(r) != ':') return json_expected(r, "':' after a key");
            r->pos++;
        }
        if (json_value(r, &j->items[j->n - 1], depth + 1) != 0) return -1;
        json_skip_space(r);
        if (json_peek(r) == close) break;
        if (json_peek(r) != ',') return json_expected(r, close == ']' ? "',' or ']'" : "',' or '}'");
        r->pos++;
    }
    r->pos++;
    return json_check_keys(r, j);
}

// Frees what *j owns, not j itself.
static inline void json_clear(Json *j) {
    int i;
    for (i = 0; i < j->n; i++) {
        json_clear(&j->items[i]);
        if (j->keys != NULL) free(j->keys[i]);
    }
    free(j->items); free(j->keys); free(j->str);
}

static inline void json_free(Json *j) {
    if (j != NULL) { json_clear(j); free(j); }
}

// Parses len bytes of JSON text. Returns the tree for json_free, or NULL with err set.
static inline Json *json_parse(const char *text, size_t len, char *err, size_t errlen) {
    JsonReader r = {text, len, 0, err, errlen};
    Json *j = NULL;
    int status;
    if (len > INT_MAX) { // so that element counts fit an int
        json_set_error(err, errlen, "expected at most %d bytes of JSON, found %zu", INT_MAX, len);
        return NULL;
    }
    if ((j = (Json *)calloc(1, sizeof(Json))) == NULL) {
        json_set_error(err, errlen, "out of memory reading JSON");
        return NULL;
    }
    status = json_value(&r, j, 0);
    json_skip_space(&r);
    if (status == 0 && r.pos < len) status = json_expected(&r, "nothing after the JSON value");
    if (status == 0) return j;
    json_free(j);
    return NULL;
}

// The value of key, or NULL if it is absent or obj is not an object.
static inline const Json *json_get(const Json *obj, const char *key) {
    int i;
    if (obj == NULL || obj->type != JSON_OBJECT) return NULL;
    for (i = 0; i < obj->n; i++) if (strcmp(obj->keys[i], key) == 0) return &obj->items[i];
    return NULL;
}

// Writes s quoted and escaped; write errors stay in ferror(f).
static inline void json_write_string(FILE *f, const char *s) {
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') { fputc('\\', f); fputc(*s, f); }
        else if ((unsigned char)*s < 0x20) fprintf(f, "\\u%04x", *s);
        else fputc(*s, f);
    }
    fputc('"', f);
}

// Reads a whole file, NUL-terminated; *len (may be NULL) excludes that NUL. Returns it malloc'ed,
// or NULL with err set. Grows as it reads, so pipes work too.
static inline char *file_read_all(const char *path, size_t *len, char *err, size_t errlen) {
    size_t n = 0, cap = 1 << 16;
    FILE *f = fopen(path, "rb");
    char *buf = f == NULL ? NULL : (char *)malloc(cap), *more;
    while (buf != NULL) {
        n += fread(buf + n, 1, cap - 1 - n, f);
        if (n < cap - 1) break; // end of file, or an error
        if ((more = (char *)realloc(buf, cap *= 2)) == NULL) free(buf);
        buf = more;
    }
    if (f == NULL || buf == NULL || ferror(f)) {
        json_set_error(err, errlen, "%s: expected a readable file, found: %s", path, strerror(errno));
        free(buf);
        buf = NULL;
    } else {
        buf[n] = '\0';
        if (len != NULL) *len = n;
    }
    if (f != NULL) fclose(f);
    return buf;
}

// ---------------------------------------------------------------------------------- safetensors

typedef struct {
    char *name;
    char dtype[8];
    int ndim;
    int64_t shape[8];
    uint64_t begin, end; // bytes relative to the data start
} StTensor;

typedef struct {
    uint8_t *map;        // the whole file
    size_t map_size;
    const uint8_t *data; // what follows the header
    size_t data_size;
    StTensor *tensors;   // in the order of their data
    int n_tensors;
    char **meta_keys, **meta_values;
    int n_meta;
} StFile;

#define ST_DTYPES "F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL"

// Bytes per element, or 0 for a dtype not in ST_DTYPES.
static inline int st_dtype_size(const char *dtype) {
    static const struct { const char *name; int size; } known[] = {
        {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
        {"I32", 4}, {"I16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}};
    size_t i;
    for (i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(dtype, known[i].name) == 0) return known[i].size;
    return 0;
}

// *bytes = elem_size times the product of shape. Returns 0, or -1 if a dimension is negative or
// the size exceeds ST_MAX_INT.
static inline int st_byte_size(int elem_size, int ndim, const int64_t *shape, uint64_t *bytes) {
    int d;
    *bytes = (uint64_t)elem_size;
    for (d = 0; d < ndim; d++) {
        if (shape[d] < 0 || shape[d] > ST_MAX_INT) return -1;
        if (shape[d] > 0 && *bytes > (uint64_t)(ST_MAX_INT / shape[d])) return -1;
        *bytes *= (uint64_t)shape[d];
    }
    return 0;
}

// Describes a JSON value for an error message, in buf when it needs formatting.
static inline const char *st_describe(const Json *j, char *buf, size_t size) {
    static const char *const names[] = {"null", "a bool", "a number", "a string", "an array", "an object"};
    if (j == NULL) return "nothing";
    if (j->type == JSON_NUMBER) snprintf(buf, size, "%.17g", j->num);
    else if (j->type == JSON_STRING) snprintf(buf, size, "\"%.40s\"", j->str);
    else return names[j->type];
    return buf;
}

// Reads n whole numbers in [0, 2^53) from an array. Returns 0, or -1 with err naming `what`.
static inline int st_integers(const Json *array, int64_t *out, const char *path, const char *name,
                              const char *what, char *err, size_t errlen) {
    char buf[80];
    int i;
    for (i = 0; i < array->n; i++) {
        const Json *j = &array->items[i];
        if (j->type != JSON_NUMBER || !(j->num >= 0 && j->num <= (double)ST_MAX_INT) || j->num != (double)(int64_t)j->num)
            return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected %s[%d] to be a whole number from 0 to 2^53-1, found %s",
                                  path, name, what, i, st_describe(j, buf, sizeof buf));
        out[i] = (int64_t)j->num;
    }
    return 0;
}

// Fills *t (but for its name) from one header entry, checked on its own. Returns 0, or -1.
static inline int st_read_tensor(StTensor *t, const char *name, const Json *info, uint64_t data_size,
                                 const char *path, char *err, size_t errlen) {
    const Json *dtype = json_get(info, "dtype"), *shape = json_get(info, "shape"), *offsets = json_get(info, "data_offsets");
    int size = dtype != NULL && dtype->type == JSON_STRING ? st_dtype_size(dtype->str) : 0;
    int64_t off[2];
    uint64_t bytes;
    char buf[80];
    if (info->type != JSON_OBJECT)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected an object, found %s", path, name, st_describe(info, buf, sizeof buf));
    if (size == 0)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected dtype to be one of " ST_DTYPES ", found %s",
                              path, name, st_describe(dtype, buf, sizeof buf));
    strcpy(t->dtype, dtype->str);
    if (shape == NULL || shape->type != JSON_ARRAY)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected shape to be an array, found %s", path, name, st_describe(shape, buf, sizeof buf));
    if (shape->n > ST_MAX_DIMS)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected shape to have at most 8 dimensions, found %d", path, name, shape->n);
    if (offsets == NULL || offsets->type != JSON_ARRAY || offsets->n != 2)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected data_offsets to be [begin,end], found %s%s", path, name,
                              st_describe(offsets, buf, sizeof buf), offsets && offsets->type == JSON_ARRAY ? " of another length" : "");
    if (st_integers(shape, t->shape, path, name, "shape", err, errlen) != 0) return -1;
    if (st_integers(offsets, off, path, name, "data_offsets", err, errlen) != 0) return -1;
    t->ndim = shape->n;
    t->begin = (uint64_t)off[0];
    t->end = (uint64_t)off[1];
    if (st_byte_size(size, t->ndim, t->shape, &bytes) != 0)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected a shape of fewer than 2^53 bytes, found an overflow", path, name);
    if (t->begin > t->end || t->end > data_size)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected begin <= end <= %llu (the data size), found data_offsets [%llu,%llu]", path, name,
                              (unsigned long long)data_size, (unsigned long long)t->begin, (unsigned long long)t->end);
    if (t->end - t->begin != bytes)
        return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected %llu bytes by its shape and dtype, found %llu by its data_offsets", path, name,
                              (unsigned long long)bytes, (unsigned long long)(t->end - t->begin));
    return 0;
}

// Orders by offset; an empty tensor comes before the one that starts where it stands.
static inline int st_compare_offsets(const void *a, const void *b) {
    const StTensor *x = (const StTensor *)a, *y = (const StTensor *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

// Fills f's tensors and metadata from the parsed header, taking over its strings, and checks that
// the tensors tile the data. Returns 0, or -1.
static inline int st_read_header(StFile *f, Json *root, const char *path, char *err, size_t errlen) {
    Json *meta = (Json *)json_get(root, "__metadata__");
    uint64_t at = 0;
    char buf[80];
    int i;
    if (meta != NULL && meta->type != JSON_OBJECT)
        return json_set_error(err, errlen, "%s: expected __metadata__ to be an object, found %s", path, st_describe(meta, buf, sizeof buf));
    f->tensors = (StTensor *)calloc((size_t)root->n + 1, sizeof(StTensor));
    f->meta_keys = (char **)calloc(meta ? (size_t)meta->n + 1 : 1, sizeof(char *));
    f->meta_values = (char **)calloc(meta ? (size_t)meta->n + 1 : 1, sizeof(char *));
    if (f->tensors == NULL || f->meta_keys == NULL || f->meta_values == NULL)
        return json_set_error(err, errlen, "%s: out of memory for %d tensors", path, root->n);
    for (i = 0; meta != NULL && i < meta->n; i++) {
        if (meta->items[i].type != JSON_STRING)
            return json_set_error(err, errlen, "%s: expected the value of __metadata__ key \"%.100s\" to be a string, found %s",
                                  path, meta->keys[i], st_describe(&meta->items[i], buf, sizeof buf));
        f->meta_keys[i] = meta->keys[i]; meta->keys[i] = NULL;
        f->meta_values[i] = meta->items[i].str; meta->items[i].str = NULL;
        f->n_meta++;
    }
    for (i = 0; i < root->n; i++) {
        StTensor *t = &f->tensors[f->n_tensors];
        if (&root->items[i] == meta) continue;
        if (st_read_tensor(t, root->keys[i], &root->items[i], f->data_size, path, err, errlen) != 0) return -1;
        t->name = root->keys[i]; root->keys[i] = NULL;
        f->n_tensors++;
    }
    qsort(f->tensors, (size_t)f->n_tensors, sizeof(StTensor), st_compare_offsets);
    for (i = 0; i < f->n_tensors; i++) {
        const StTensor *t = &f->tensors[i];
        if (t->begin != at)
            return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected its data at byte %llu, where the previous tensor ends, found it at %llu (%s)", path,
                                  t->name, (unsigned long long)at, (unsigned long long)t->begin, t->begin < at ? "an overlap" : "a hole");
        at = t->end;
    }
    if (at != f->data_size)
        return json_set_error(err, errlen, "%s: expected the tensors to cover all %llu data bytes, found them ending at %llu", path,
                              (unsigned long long)f->data_size, (unsigned long long)at);
    return 0;
}

// Maps the file at path and reads its header into the zeroed *f. Returns 0, or -1 with *f safe to close.
static inline int st_map(StFile *f, const char *path, char *err, size_t errlen) {
    struct stat s;
    uint64_t header = 0, limit;
    char why[256] = "";
    void *map = MAP_FAILED;
    Json *root;
    int status, problem, fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return json_set_error(err, errlen, "%s: expected a readable file, found: %s", path, strerror(errno));
    status = fstat(fd, &s);
    if (status == 0 && S_ISREG(s.st_mode) && s.st_size >= 8) map = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    problem = errno;
    close(fd);
    if (status == 0 && !S_ISREG(s.st_mode)) return json_set_error(err, errlen, "%s: expected a regular file, found another kind", path);
    if (status == 0 && s.st_size < 8)
        return json_set_error(err, errlen, "%s: expected at least 8 bytes, found %lld", path, (long long)s.st_size);
    if (map == MAP_FAILED) return json_set_error(err, errlen, "%s: expected to map the file, found: %s", path, strerror(problem));
    f->map = (uint8_t *)map;
    f->map_size = (size_t)s.st_size;
    memcpy(&header, f->map, 8);
    limit = f->map_size - 8 < ST_MAX_HEADER ? f->map_size - 8 : ST_MAX_HEADER;
    if (header > limit)
        return json_set_error(err, errlen, "%s: expected a header length of at most %llu bytes, found %llu", path,
                              (unsigned long long)limit, (unsigned long long)header);
    if (header == 0 || f->map[8] != '{') return json_set_error(err, errlen, "%s: expected the header to be a JSON object starting with '{', found something else", path);
    f->data = f->map + 8 + header;
    f->data_size = f->map_size - 8 - (size_t)header;
    root = json_parse((const char *)f->map + 8, (size_t)header, why, sizeof why);
    if (root == NULL) return json_set_error(err, errlen, "%s: JSON header: %s", path, why);
    status = st_read_header(f, root, path, err, errlen);
    json_free(root);
    return status;
}

// Releases everything f holds, and zeroes it.
static inline void st_close(StFile *f) {
    int i;
    for (i = 0; i < f->n_tensors; i++) free(f->tensors[i].name);
    for (i = 0; i < f->n_meta; i++) { free(f->meta_keys[i]); free(f->meta_values[i]); }
    free(f->tensors); free(f->meta_keys); free(f->meta_values);
    if (f->map != NULL) munmap(f->map, f->map_size);
    memset(f, 0, sizeof *f);
}

// Opens and validates a safetensors file. Returns 0, or -1 with err set and *f zeroed.
static inline int st_open(StFile *f, const char *path, char *err, size_t errlen) {
    memset(f, 0, sizeof *f);
    if (st_map(f, path, err, errlen) == 0) return 0;
    st_close(f);
    return -1;
}

// The tensor of that name, or NULL.
static inline const StTensor *st_find(const StFile *f, const char *name) {
    int i;
    for (i = 0; i < f->n_tensors; i++) if (strcmp(f->tensors[i].name, name) == 0) return &f->tensors[i];
    return NULL;
}

// The metadata value of key, or NULL.
static inline const char *st_meta(const StFile *f, const char *key) {
    int i;
    for (i = 0; i < f->n_meta; i++) if (strcmp(f->meta_keys[i], key) == 0) return f->meta_values[i];
    return NULL;
}

// The number of elements (1 for a scalar).
static inline int64_t st_count(const StTensor *t) {
    return (int64_t)((t->end - t->begin) / (uint64_t)st_dtype_size(t->dtype));
}

// IEEE half precision to double, exactly.
static inline double st_half_to_double(uint16_t h) {
    int e = h >> 10 & 31;
    uint32_t m = h & 1023, bits = e == 31 ? 0x7f800000u | m << 13 : (uint32_t)(e + 112) << 23 | m << 13;
    float f;
    memcpy(&f, &bits, 4);
    if (e == 0) f = (float)m / 16777216.0f; // subnormal: m * 2^-24
    return h & 0x8000 ? -(double)f : (double)f;
}

// Element i as a double (an I64 beyond 2^53 rounds); NaN if i is out of range.
static inline double st_get(const StFile *f, const StTensor *t, int64_t i) {
    const uint8_t *p = f->data + t->begin;
    const char *d = t->dtype;
    if (i < 0 || i >= st_count(t)) return NAN;
    p += (uint64_t)i * (uint64_t)st_dtype_size(d);
    // memcpy, since data follows a header of any length and may be unaligned
    if (!strcmp(d, "F32")) { float v; memcpy(&v, p, 4); return v; }
    if (!strcmp(d, "BF16")) { uint32_t b = (uint32_t)(p[0] | p[1] << 8) << 16; float v; memcpy(&v, &b, 4); return v; }
    if (!strcmp(d, "F16")) return st_half_to_double((uint16_t)(p[0] | p[1] << 8));
    if (!strcmp(d, "F64")) { double v; memcpy(&v, p, 8); return v; }
    if (!strcmp(d, "I64")) { int64_t v; memcpy(&v, p, 8); return (double)v; }
    if (!strcmp(d, "I32")) { int32_t v; memcpy(&v, p, 4); return v; }
    if (!strcmp(d, "I16")) { int16_t v; memcpy(&v, p, 2); return v; }
    if (!strcmp(d, "I8")) return (int8_t)*p;
    if (!strcmp(d, "BOOL")) return *p != 0;
    return *p; // U8
}

typedef struct { const char *name; const char *dtype; int ndim; int64_t shape[8]; const void *data; } StOut;

// Writes the JSON header to h. Returns 0, or -1 for a tensor that cannot be described.
static inline int st_write_header(FILE *h, const char *path, const StOut *t, int n, const char *const *meta_kv, int n_meta,
                                  char *err, size_t errlen) {
    uint64_t bytes, at = 0;
    int i, d;
    fputs("{\"__metadata__\":{\"format\":\"pt\"", h);
    for (i = 0; i < n_meta; i++) {
        // metadata copied from a file that st_write made already has this entry
        if (!strcmp(meta_kv[2 * i], "format") && !strcmp(meta_kv[2 * i + 1], "pt")) continue;
        fputc(',', h);
        json_write_string(h, meta_kv[2 * i]);
        fputc(':', h);
        json_write_string(h, meta_kv[2 * i + 1]);
    }
    fputc('}', h);
    for (i = 0; i < n; i++) {
        int size = st_dtype_size(t[i].dtype);
        if (size == 0) return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected dtype to be one of " ST_DTYPES ", found \"%.40s\"", path, t[i].name, t[i].dtype);
        if (t[i].ndim < 0 || t[i].ndim > ST_MAX_DIMS)
            return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected 0 to 8 dimensions, found %d", path, t[i].name, t[i].ndim);
        if (st_byte_size(size, t[i].ndim, t[i].shape, &bytes) != 0 || bytes > (uint64_t)ST_MAX_INT - at)
            return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected a nonnegative shape and fewer than 2^53 bytes, found otherwise", path, t[i].name);
        if (bytes > 0 && t[i].data == NULL)
            return json_set_error(err, errlen, "%s: tensor \"%.100s\": expected %llu bytes of data, found NULL", path, t[i].name, (unsigned long long)bytes);
        fputc(',', h);
        json_write_string(h, t[i].name);
        fprintf(h, ":{\"dtype\":\"%s\",\"shape\":[", t[i].dtype);
        for (d = 0; d < t[i].ndim; d++) fprintf(h, "%s%lld", d ? "," : "", (long long)t[i].shape[d]);
        fprintf(h, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at, (unsigned long long)(at + bytes));
        at += bytes;
    }
    fputc('}', h);
    while (ftell(h) % 8 != 0 && !ferror(h)) fputc(' ', h); // the data then starts 8-byte aligned
    return 0;
}

// Writes a safetensors file of n tensors and n_meta metadata pairs, plus "format":"pt" (a pair that
// gives "format" another value is refused as a duplicate). The data is on disk when it returns 0.
// Otherwise returns -1 with err set, having removed the file if it began one. Writes in place: to
// keep an old file in case of failure, or to write tensors mapped from that same file, write
// elsewhere and rename.
static inline int st_write(const char *path, const StOut *t, int n, const char *const *meta_kv, int n_meta,
                           char *err, size_t errlen) {
    char *head = NULL, why[256] = "";
    size_t len = 0;
    uint64_t bytes, length;
    struct stat s;
    Json *check = NULL;
    int i, ok, problem, regular, status = -1;
    FILE *f, *h = open_memstream(&head, &len); // the length comes first, so build the header in memory
    if (h == NULL) return json_set_error(err, errlen, "%s: out of memory for the header", path);
    status = st_write_header(h, path, t, n, meta_kv, n_meta, err, errlen);
    ok = !ferror(h);
    if (fclose(h) != 0) ok = 0;
    if (status == 0 && !ok) status = json_set_error(err, errlen, "%s: out of memory for the header", path);
    if (status == 0 && len > ST_MAX_HEADER)
        status = json_set_error(err, errlen, "%s: expected a header of at most %d bytes, found %zu", path, ST_MAX_HEADER, len);
    // reading it back catches duplicate names and invalid UTF-8, which no reader would accept
    if (status == 0 && (check = json_parse(head, len, why, sizeof why)) == NULL)
        status = json_set_error(err, errlen, "%s: JSON header to write: %s", path, why);
    json_free(check);
    if (status != 0) { free(head); return -1; }

    if ((f = fopen(path, "wb")) == NULL) {
        free(head);
        return json_set_error(err, errlen, "%s: expected to create the file, found: %s", path, strerror(errno));
    }
    regular = fstat(fileno(f), &s) == 0 && S_ISREG(s.st_mode); // never remove a device such as /dev/full
    length = len;
    ok = fwrite(&length, 1, 8, f) == 8 && fwrite(head, 1, len, f) == len;
    for (i = 0; i < n && ok; i++) {
        st_byte_size(st_dtype_size(t[i].dtype), t[i].ndim, t[i].shape, &bytes);
        ok = bytes == 0 || fwrite(t[i].data, 1, (size_t)bytes, f) == bytes;
    }
    ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
    problem = errno;
    if (fclose(f) != 0 && ok) { ok = 0; problem = errno; }
    free(head);
    if (ok) return 0;
    if (regular) unlink(path);
    return json_set_error(err, errlen, "%s: expected to write the whole file, found: %s", path, strerror(problem));
}

// 64-bit checksum of a file's bytes and length: FNV-1a over 8-byte little-endian words, with a
// shift so that high bits spread downwards too. Each step is a bijection of the state and of the
// word, so any single changed word changes the result. On error sets *failed to 1 and returns 0.
static inline uint64_t hash_file(const char *path, char *err, size_t errlen, int *failed) {
    uint64_t h = 14695981039346656037ull, total = 0, word;
    const uint64_t prime = 1099511628211ull;
    uint8_t buf[1 << 15];
    size_t n = 0, i;
    FILE *f = fopen(path, "rb");
    *failed = f == NULL;
    while (f != NULL && (n = fread(buf, 1, sizeof buf, f)) > 0) {
        for (i = 0; i < n; i += 8) {
            word = 0; // zero padding of the last word is told apart by the length
            memcpy(&word, buf + i, n - i < 8 ? n - i : 8);
            h = (h ^ word) * prime;
            h ^= h >> 32;
        }
        total += n;
    }
    if (f == NULL || ferror(f)) {
        *failed = 1;
        json_set_error(err, errlen, "%s: expected a readable file, found: %s", path, strerror(errno));
    }
    if (f != NULL) fclose(f);
    h = (h ^ total) * prime;
    return *failed ? 0 : h ^ h >> 32;
}

#endif
