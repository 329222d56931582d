// Tests data/safetensors.h. Run from the repository root: test_safetensors [seed]
// Inputs are fresh every run; pass the printed seed to repeat one.
#include <sys/resource.h>
#include <signal.h>
#include <time.h>
#include "../../data/safetensors.h"

static int n_passed, n_failed;
static uint64_t rng_state;
static char dir[] = "/tmp/test_safetensors_XXXXXX";
static char path[64]; // one scratch file, reused
static char err[512];

// Records one check; the rest of the arguments say why it failed.
__attribute__((format(printf, 3, 4)))
static int check(int ok, const char *name, const char *why, ...) {
    va_list ap;
    if (ok) { n_passed++; printf("ok %s\n", name); return 1; }
    n_failed++;
    printf("FAIL %s: ", name);
    va_start(ap, why);
    vprintf(why, ap);
    va_end(ap);
    printf("\n");
    return 0;
}

// xorshift64*
static uint64_t rng(void) {
    rng_state ^= rng_state >> 12; rng_state ^= rng_state << 25; rng_state ^= rng_state >> 27;
    return rng_state * 2685821657736338717ull;
}

// Replaces the scratch file. A test that cannot write its input cannot go on.
static void put_file(const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) { perror(path); exit(2); }
}

// Writes a file with this header text and data_size zero bytes of data.
static void put_header(const char *header, size_t data_size) {
    uint64_t n = strlen(header);
    size_t total = 8 + n + data_size;
    char *buf = (char *)calloc(1, total);
    memcpy(buf, &n, 8);
    memcpy(buf + 8, header, n);
    put_file(buf, total);
    free(buf);
}

// Opens the scratch file and touches everything in it. Returns st_open's result.
static int open_and_read(void) {
    StFile f;
    int i, status = st_open(&f, path, err, sizeof err);
    int64_t k;
    volatile double sink = 0;
    if (status != 0) return status;
    for (i = 0; i < f.n_tensors; i++)
        for (k = 0; k < st_count(&f.tensors[i]); k++) sink = sink + st_get(&f, &f.tensors[i], k);
    for (i = 0; i < f.n_meta; i++) sink = sink + (double)(strlen(f.meta_keys[i]) + strlen(f.meta_values[i]));
    st_close(&f);
    return 0;
}

// What element i of raw little-endian data is, computed apart from st_get's float tricks.
static double reference(const char *dtype, const uint8_t *data, int64_t i) {
    int size = st_dtype_size(dtype), b, e, bits = size * 8, mant;
    const uint8_t *p = data + i * size;
    uint64_t u = 0;
    double v;
    for (b = 0; b < size; b++) u |= (uint64_t)p[b] << 8 * b;
    if (!strcmp(dtype, "BOOL")) return u != 0;
    if (dtype[0] == 'U') return (double)u;
    if (dtype[0] == 'I') return bits < 64 && u >> (bits - 1) ? (double)u - ldexp(1, bits) : (double)(int64_t)u;
    mant = bits == 64 ? 52 : bits == 32 ? 23 : !strcmp(dtype, "BF16") ? 7 : 10;
    e = (int)(u >> mant & ((1u << (bits - 1 - mant)) - 1));
    v = (double)(u & ((1ull << mant) - 1));
    if (e == (1 << (bits - 1 - mant)) - 1) v = v != 0 ? NAN : INFINITY;
    else {
        int bias = (1 << (bits - 2 - mant)) - 1;
        v = e == 0 ? ldexp(v, 1 - bias - mant) : ldexp(v + ldexp(1, mant), e - bias - mant);
    }
    return u >> (bits - 1) ? -v : v;
}

// Equal, or both NaN.
static int same(double a, double b) { return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b); }

static void test_round_trip(void) {
    static const char *const dtypes[] = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"};
    enum { N = 30, ROUNDS = 10 };
    int round, i, d, bad_open = 0, bad_info = 0, bad_bytes = 0, bad_value = 0;
    for (round = 0; round < ROUNDS; round++) {
        StOut out[N];
        uint8_t *data[N];
        char names[N][32];
        StFile f;
        memset(out, 0, sizeof out);
        for (i = 0; i < N; i++) {
            size_t k, bytes;
            out[i].dtype = dtypes[i < 10 ? (uint64_t)i : rng() % 10];
            out[i].ndim = (int)(rng() % 9);
            bytes = (size_t)st_dtype_size(out[i].dtype);
            for (d = 0; d < out[i].ndim; d++) {
                uint64_t r = rng();
                out[i].shape[d] = r % 16 == 0 ? 0 : (int64_t)(1 + (r >> 8) % (out[i].ndim > 4 ? 2 : 5));
                bytes *= (size_t)out[i].shape[d];
            }
            data[i] = (uint8_t *)malloc(bytes + 1);
            for (k = 0; k < bytes; k++) data[i][k] = (uint8_t)rng();
            snprintf(names[i], sizeof names[i], "t%d.%llx", i, (unsigned long long)rng());
            out[i].name = names[i];
            out[i].data = bytes ? data[i] : NULL;
        }
        if (st_write(path, out, N, NULL, 0, err, sizeof err) != 0 || st_open(&f, path, err, sizeof err) != 0) bad_open++;
        else {
            bad_info += f.n_tensors != N || st_find(&f, "absent") != NULL || (f.data - f.map) % 8 != 0;
            for (i = 0; i < N; i++) {
                const StTensor *t = st_find(&f, names[i]);
                int64_t k, count = 1;
                for (d = 0; d < out[i].ndim; d++) count *= out[i].shape[d];
                if (t == NULL || strcmp(t->dtype, out[i].dtype) || t->ndim != out[i].ndim || st_count(t) != count ||
                    memcmp(t->shape, out[i].shape, (size_t)t->ndim * sizeof t->shape[0]) != 0) { bad_info++; continue; }
                if (memcmp(f.data + t->begin, data[i], t->end - t->begin) != 0) bad_bytes++;
                for (k = 0; k < count; k++) bad_value += !same(st_get(&f, t, k), reference(t->dtype, data[i], k));
                bad_info += !isnan(st_get(&f, t, -1)) || !isnan(st_get(&f, t, count));
            }
            st_close(&f);
        }
        for (i = 0; i < N; i++) free(data[i]);
    }
    check(bad_open == 0, "round trip: written and opened", "%d of %d rounds failed: %s", bad_open, ROUNDS, err);
    check(bad_info == 0, "round trip: names, dtypes, shapes, counts", "%d mismatches", bad_info);
    check(bad_bytes == 0, "round trip: bytes", "%d tensors differ", bad_bytes);
    check(bad_value == 0, "round trip: st_get agrees with a reference decoder", "%d elements differ", bad_value);
    check(st_write(path, NULL, 0, NULL, 0, err, sizeof err) == 0 && open_and_read() == 0, "round trip: no tensors", "%s", err);
}

static void test_metadata(void) {
    static const char *const kv[] = {"quote\"back\\slash", "tab\t newline\n bell\a del\x7f", "gr\xc3\xbc\xc3\x9f", "\xe2\x82\xac \xf0\x9f\x8e\xa9",
                                     "", "", "json", "{\"a\": [1, \"b\"]}", "format", "pt"};
    static const char *const bad_utf8[] = {"k", "\xc3("}, *const twice[] = {"k", "1", "k", "2"}, *const other[] = {"format", "np"};
    StFile f;
    char key[33], value[65];
    const char *random_kv[2];
    int i, bad = 0;
    if (check(st_write(path, NULL, 0, kv, 5, err, sizeof err) == 0 && st_open(&f, path, err, sizeof err) == 0, "metadata: written and opened", "%s", err)) {
        for (i = 0; i < 5; i++) {
            const char *v = st_meta(&f, kv[2 * i]);
            bad += v == NULL || strcmp(v, kv[2 * i + 1]) != 0;
        }
        check(bad == 0 && f.n_meta == 5, "metadata: escapes and unicode survive", "%d values differ, %d pairs", bad, f.n_meta);
        check(st_meta(&f, "absent") == NULL, "metadata: absent key is NULL", "it was found");
        st_close(&f);
    }
    bad = 0;
    for (i = 0; i < 50; i++) {
        int k;
        for (k = 0; k < 32; k++) key[k] = (char)(1 + rng() % 127);
        for (k = 0; k < 64; k++) value[k] = (char)(1 + rng() % 127);
        key[32] = value[64] = '\0';
        random_kv[0] = key; random_kv[1] = value;
        if (st_write(path, NULL, 0, random_kv, 1, err, sizeof err) != 0 || st_open(&f, path, err, sizeof err) != 0) { bad++; continue; }
        bad += st_meta(&f, key) == NULL || strcmp(st_meta(&f, key), value) != 0;
        st_close(&f);
    }
    check(bad == 0, "metadata: random ASCII survives", "%d of 50 differ: %s", bad, err);
    put_header("{\"__metadata__\":{\"k\":\"\\u00e9\\u20AC\\ud83c\\udfa9\\/\\b\\f\\n\\r\\t\\u0041\"}}  ", 0);
    if (check(st_open(&f, path, err, sizeof err) == 0, "metadata: \\u escapes open", "%s", err)) {
        check(!strcmp(st_meta(&f, "k"), "\xc3\xa9\xe2\x82\xac\xf0\x9f\x8e\xa9/\b\f\n\r\tA"), "metadata: \\u escapes to UTF-8", "got %s", st_meta(&f, "k"));
        st_close(&f);
    }
    check(st_write(path, NULL, 0, bad_utf8, 1, err, sizeof err) == -1 && strstr(err, "valid UTF-8"), "metadata: invalid UTF-8 not written", "%s", err);
    check(st_write(path, NULL, 0, twice, 2, err, sizeof err) == -1 && strstr(err, "duplicate"), "metadata: duplicate key not written", "%s", err);
    check(st_write(path, NULL, 0, other, 1, err, sizeof err) == -1 && strstr(err, "duplicate"), "metadata: other format not written", "%s", err);
}

// The scratch file must be refused with one line that names it, says "expected" and contains `want`.
static void expect_refused(const char *name, const char *want) {
    int status;
    char label[96];
    snprintf(label, sizeof label, "refused: %s", name);
    memset(err, 0, sizeof err);
    status = open_and_read();
    check(status == -1 && strstr(err, path) && strstr(err, "expected") && strstr(err, want) && !strchr(err, '\n'),
          label, "status %d, wanted \"%s\" in \"%s\"", status, want, err);
}

static void test_bad_files(void) {
    static const struct { const char *name, *header; size_t data; const char *want; } cases[] = {
        {"not JSON", "{hello}", 0, "double quotes"},
        {"not an object", "[1,2]", 0, "JSON object"},
        {"empty header", "", 0, "JSON object"},
        {"leading space", " {}", 0, "JSON object"},
        {"trailing garbage", "{} x", 0, "nothing after"},
        {"tensor not an object", "{\"a\":3}", 0, "an object, found 3"},
        {"dtype unknown", "{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "dtype to be one of"},
        {"dtype absent", "{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "found nothing"},
        {"dtype a number", "{\"a\":{\"dtype\":4,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "found 4"},
        {"shape absent", "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "shape to be an array"},
        {"shape of 9 dimensions", "{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "at most 8 dimensions, found 9"},
        {"shape negative", "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "shape[0] to be a whole number"},
        {"shape fractional", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,0.5],\"data_offsets\":[0,4]}}", 4, "shape[1] to be a whole number"},
        {"shape of strings", "{\"a\":{\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]}}", 4, "found \"1\""},
        {"shape beyond 2^53", "{\"a\":{\"dtype\":\"F32\",\"shape\":[18446744073709551617],\"data_offsets\":[0,4]}}", 4, "2^53"},
        {"shape/offset mismatch", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "expected 8 bytes by its shape and dtype, found 4"},
        {"product overflow", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "overflow"},
        {"product overflow by dtype", "{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0, "2^53"},
        {"offsets absent", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "[begin,end], found nothing"},
        {"offsets of length 3", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "another length"},
        {"offset past the end", "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "<= 4 (the data size), found data_offsets [0,8]"},
        {"offsets reversed", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "begin <= end"},
        {"offset negative", "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "data_offsets[0] to be a whole number"},
        {"overlap", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, "an overlap"},
        {"same data twice", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "an overlap"},
        {"hole at the start", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}", 6, "a hole"},
        {"hole in the middle", "{\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[5,9]},\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 9, "a hole"},
        {"data uncovered at the end", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5, "cover all 5 data bytes, found them ending at 4"},
        {"duplicate tensor name", "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0, "duplicate key \"a\""},
        {"duplicate name by escape", "{\"a\":{},\"\\u0061\":{}}", 0, "duplicate key \"a\""},
        {"metadata not an object", "{\"__metadata__\":[]}", 0, "found an array"},
        {"metadata value a number", "{\"__metadata__\":{\"k\":1}}", 0, "key \"k\" to be a string"},
        {"newline in a name", "{\"a\\nb\":null}", 0, "a?b"},
    };
    static const char *const good = "{\"z\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[4,4]},\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}} ";
    uint64_t huge[3] = {0, 0, 0};
    size_t i;
    put_header(good, 4);
    check(open_and_read() == 0, "accepted: a scalar, an empty tensor, padding", "%s", err);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put_header(cases[i].header, cases[i].data);
        expect_refused(cases[i].name, cases[i].want);
    }
    put_file("1234567", 7);
    expect_refused("short file", "at least 8 bytes, found 7");
    put_file("", 0);
    expect_refused("empty file", "at least 8 bytes, found 0");
    huge[0] = 17;
    put_file(huge, sizeof huge);
    expect_refused("header longer than the file", "at most 16 bytes, found 17");
    huge[0] = UINT64_MAX;
    put_file(huge, sizeof huge);
    expect_refused("header length near 2^64", "header length of at most 16 bytes");
    huge[0] = 100000001;
    put_file(huge, sizeof huge);
    if (truncate(path, 100000100) == 0) expect_refused("header over 100 MB", "at most 100000000 bytes, found 100000001");
    unlink(path);
    expect_refused("no such file", "readable file");
    check(st_open((StFile[1]){{0}}, dir, err, sizeof err) == -1 && strstr(err, "regular file"), "refused: a directory", "%s", err);
}

// A small random file: truncated at each byte, and with each bit of its header flipped.
static void test_damage(void) {
    static const char *const kv[] = {"kind", "caf\xc3\xa9\n"};
    StOut out[3];
    float values[6];
    size_t len, n, header, opened = 0;
    char *bytes;
    int i, bad = 0;
    memset(out, 0, sizeof out);
    for (i = 0; i < 6; i++) values[i] = (float)(rng() % 1000);
    for (i = 0; i < 3; i++) out[i].data = values;
    out[0].name = "w"; out[0].dtype = "F32"; out[0].ndim = 2; out[0].shape[0] = 2; out[0].shape[1] = 3;
    out[1].name = "empty"; out[1].dtype = "I64"; out[1].ndim = 1;
    out[2].name = "half"; out[2].dtype = "BF16"; out[2].ndim = 1; out[2].shape[0] = 1 + (int64_t)(rng() % 12);
    if (!check(st_write(path, out, 3, kv, 1, err, sizeof err) == 0, "damage: file written", "%s", err)) return;
    bytes = file_read_all(path, &len, err, sizeof err);
    if (!check(bytes != NULL, "damage: file read back", "%s", err)) return;
    for (n = 0; n < len; n++) {
        put_file(bytes, n);
        memset(err, 0, sizeof err);
        bad += open_and_read() != -1 || !strstr(err, path) || !strstr(err, "expected");
    }
    check(bad == 0, "damage: truncation at every byte is refused", "%d of %zu lengths", bad, len);
    put_file(bytes, len);
    header = 8 + (size_t)((unsigned char)bytes[0] | (unsigned char)bytes[1] << 8);
    for (n = 0; n < header * 8; n++) {
        bytes[n / 8] ^= (char)(1 << n % 8);
        put_file(bytes, len);
        opened += open_and_read() == 0;
        bytes[n / 8] ^= (char)(1 << n % 8);
    }
    check(opened < header * 8, "damage: each header bit flipped, no crash", "all %zu opened", opened);
    for (n = 0; n < 2000; n++) { // several random bytes changed
        char *copy = (char *)malloc(len);
        memcpy(copy, bytes, len);
        for (i = (int)(rng() % 6); i >= 0; i--) copy[8 + rng() % (header - 8)] = "{}[]\",:\\0129-.eu \x80\xff"[rng() % 19];
        put_file(copy, len);
        open_and_read();
        free(copy);
    }
    check(1, "damage: 2000 random mutations, no crash", "-");
    free(bytes);
}

static void test_conversions(void) {
    static const struct { uint16_t bits; double value; } f16[] = {
        {0x0000, 0}, {0x8000, -0.0}, {0x3C00, 1}, {0xC000, -2}, {0x7BFF, 65504}, {0x3555, 0.333251953125}, {0x0400, 6.103515625e-05},
        {0x0001, 5.9604644775390625e-08}, {0x03FF, 6.097555160522461e-05}, {0x8001, -5.9604644775390625e-08},
        {0x7C00, INFINITY}, {0xFC00, -INFINITY}, {0x7E00, NAN}, {0x7C01, NAN}},
    bf16[] = {
        {0x0000, 0}, {0x8000, -0.0}, {0x3F80, 1}, {0xC000, -2}, {0x4049, 3.140625}, {0x7F7F, 0x1.fep127}, {0x0080, 0x1p-126},
        {0x0001, 0x1p-133}, {0x007F, 0x1.fcp-127}, {0x8001, -0x1p-133}, {0x7F80, INFINITY}, {0xFF80, -INFINITY}, {0x7FC0, NAN}, {0x7F81, NAN}};
    uint16_t a[14], b[14];
    StOut out[3];
    StFile f;
    int i, bad16 = 0, badb = 0;
    uint8_t pad = 1;
    memset(out, 0, sizeof out);
    for (i = 0; i < 14; i++) { a[i] = f16[i].bits; b[i] = bf16[i].bits; }
    out[0].name = "pad"; out[0].dtype = "BOOL"; out[0].data = &pad; // makes the others unaligned
    out[1].name = "f16"; out[1].dtype = "F16"; out[1].ndim = 1; out[1].shape[0] = 14; out[1].data = a;
    out[2].name = "bf16"; out[2].dtype = "BF16"; out[2].ndim = 1; out[2].shape[0] = 14; out[2].data = b;
    if (!check(st_write(path, out, 3, NULL, 0, err, sizeof err) == 0 && st_open(&f, path, err, sizeof err) == 0, "conversions: file", "%s", err)) return;
    for (i = 0; i < 14; i++) {
        bad16 += !same(st_get(&f, st_find(&f, "f16"), i), f16[i].value);
        badb += !same(st_get(&f, st_find(&f, "bf16"), i), bf16[i].value);
    }
    check(bad16 == 0, "conversions: F16 known values", "%d differ", bad16);
    check(badb == 0, "conversions: BF16 known values", "%d differ", badb);
    st_close(&f);
}

static void test_json(void) {
    static const char *const bad[] = {"", " ", "nul", "tru", "+1", "01", "1.", ".5", "1e", "-", "0x10", "1e999", "NaN", "Infinity", "'a'", "\"a", "\"\\x\"", "\"\\u12g4\"",
        "\"\\ud800\"", "\"\\udc00\"", "\"\\ud800\\u0041\"", "\"\\u0000\"", "\"a\nb\"", "\"\xff\"", "\"\xc0\x80\"", "\"\xed\xa0\x80\"", "\"\xf4\x90\x80\x80\"", "\"\xe2\x82\"",
        "[", "[1", "[1,", "[1,]", "[,1]", "[1 2]", "]", "{", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,", "{\"a\":1,}", "{,}", "{a:1}", "{1:1}", "{\"a\" 1}",
        "{\"a\":1,\"b\":2,\"a\":3}", "1 2", "{}{}", "null,", "[1}", "{\"a\":1]", "\"\\", "\"\\\""};
    static const char *const text = " {\"a\" : [1, -2.5e1, true, false, null, \"x\\n\\u00e9\"], \"o\": {\"k\": {}}, \"e\": [], \"\": 0} ";
    char deep[256];
    size_t i, n = strlen(text), accepted = 0;
    Json *j = json_parse(text, n, err, sizeof err);
    const Json *a = json_get(j, "a");
    check(j != NULL && a != NULL && a->type == JSON_ARRAY && a->n == 6 && a->items[0].num == 1 && a->items[1].num == -25 && a->items[2].type == JSON_BOOL &&
          a->items[2].num == 1 && a->items[3].num == 0 && a->items[4].type == JSON_NULL && !strcmp(a->items[5].str, "x\n\xc3\xa9"), "json: values", "%s", err);
    check(j != NULL && json_get(json_get(j, "o"), "k") != NULL && json_get(j, "zz") == NULL && json_get(a, "k") == NULL && json_get(NULL, "k") == NULL &&
          json_get(j, "e")->n == 0 && json_get(j, "") != NULL, "json: json_get", "a lookup is wrong");
    json_free(j);
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) { // exact-size heap copies, so that ASan sees any overrun
        size_t len = strlen(bad[i]);
        char *copy = (char *)malloc(len ? len : 1);
        memcpy(copy, bad[i], len);
        err[0] = '\0';
        j = json_parse(copy, len, err, sizeof err);
        if (j != NULL || !strstr(err, "expected") || !strstr(err, "found")) { accepted++; printf("  wrongly handled: %s (%s)\n", bad[i], err); }
        json_free(j);
        free(copy);
    }
    check(accepted == 0, "json: malformed texts are refused", "%zu were not", accepted);
    for (accepted = 0, i = 0; i + 1 < n; i++) {
        char *copy = (char *)malloc(i ? i : 1);
        memcpy(copy, text, i);
        j = json_parse(copy, i, err, sizeof err);
        accepted += j != NULL;
        json_free(j);
        free(copy);
    }
    check(accepted == 0, "json: truncated texts are refused", "%zu were not", accepted);
    for (i = 0; i < 65; i++) { deep[i] = '['; deep[65 + i] = ']'; }
    j = json_parse(deep + 1, 128, err, sizeof err);
    check(j != NULL, "json: 64 levels accepted", "%s", err);
    json_free(j);
    j = json_parse(deep, 130, err, sizeof err);
    check(j == NULL && strstr(err, "64"), "json: 65 levels refused", "%s", err);
    json_free(j);
}

static void test_oracle_file(void) {
    static const char oracle[] = "dev/test/oracle/dsa_v32.safetensors";
    StFile f;
    const StTensor *loss;
    const char *config;
    Json *j;
    if (!check(st_open(&f, oracle, err, sizeof err) == 0, "oracle file: opens", "%s", err)) return;
    loss = st_find(&f, "out.loss");
    check(loss != NULL && st_count(loss) == 1 && isfinite(st_get(&f, loss, 0)), "oracle file: out.loss has one element", "absent or another count");
    config = st_meta(&f, "config");
    j = config == NULL ? NULL : json_parse(config, strlen(config), err, sizeof err);
    check(json_get(j, "hidden_size") != NULL && json_get(j, "hidden_size")->num == 48, "oracle file: config has hidden_size 48", "config is %s", config ? config : "absent");
    json_free(j);
    st_close(&f);
}

static void test_hash(void) {
    uint8_t bytes[1009];
    uint64_t first, h;
    int i, failed = 0, any = 0, equal = 0;
    for (i = 0; i < 1009; i++) bytes[i] = i < 1000 ? (uint8_t)rng() : 0;
    put_file(bytes, 1000);
    first = hash_file(path, err, sizeof err, &failed);
    check(!failed && hash_file(path, err, sizeof err, &failed) == first, "hash: repeatable", "%s", err);
    for (i = 0; i < 8000; i++) {
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
        put_file(bytes, 1000);
        h = hash_file(path, err, sizeof err, &failed);
        any |= failed; equal += h == first;
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
    }
    check(!any && equal == 0, "hash: every bit flip changes it", "%d of 8000 do not", equal);
    for (equal = 0, i = 1001; i <= 1009; i++) {
        put_file(bytes, (size_t)i);
        h = hash_file(path, err, sizeof err, &failed);
        equal += h == first;
        first = h;
    }
    check(equal == 0, "hash: appended zero bytes change it", "%d of 9 do not", equal);
    bytes[7] ^= 0x80; bytes[807] ^= 0x80; // plain FNV never spreads the top bit, so these two would cancel
    put_file(bytes, 1009);
    check(hash_file(path, err, sizeof err, &failed) != first, "hash: two flipped top bits change it", "they cancel");
    hash_file("/nonexistent/x", err, sizeof err, &failed);
    check(failed == 1 && strstr(err, "/nonexistent/x"), "hash: unreadable file fails", "%s", err);
    hash_file(dir, err, sizeof err, &failed);
    check(failed == 1, "hash: directory fails", "no failure");
    check(file_read_all("/nonexistent/x", NULL, err, sizeof err) == NULL && strstr(err, "/nonexistent/x"), "file_read_all: unreadable file fails", "%s", err);
    check(file_read_all(dir, NULL, err, sizeof err) == NULL, "file_read_all: directory fails", "no failure");
}

static void test_large_read(void) {
    size_t n = 65530 + rng() % 200000, len = 0, i;
    char *bytes = (char *)malloc(n), *back;
    for (i = 0; i < n; i++) bytes[i] = (char)rng();
    put_file(bytes, n);
    back = file_read_all(path, &len, err, sizeof err);
    check(back != NULL && len == n && memcmp(back, bytes, n) == 0 && back[n] == '\0', "file_read_all: returns the bytes", "%zu of %zu bytes", len, n);
    free(back);
    free(bytes);
}

static void test_write_errors(void) {
    static float values[65536];
    StOut out, two[2];
    struct rlimit old, small;
    int status;
    memset(&out, 0, sizeof out);
    out.name = "w"; out.dtype = "F32"; out.ndim = 1; out.shape[0] = 65536; out.data = values;
    status = st_write("/nonexistent/x", &out, 1, NULL, 0, err, sizeof err);
    check(status == -1 && strstr(err, "/nonexistent/x"), "write: unwritable path", "status %d: %s", status, err);
    if (access("/dev/full", W_OK) != 0) printf("skip write: /dev/full does not exist\n");
    else {
        status = st_write("/dev/full", &out, 1, NULL, 0, err, sizeof err);
        check(status == -1 && strstr(err, "/dev/full"), "write: disk full", "status %d: %s", status, err);
        out.shape[0] = 1; // small enough to fail only when flushed
        status = st_write("/dev/full", &out, 1, NULL, 0, err, sizeof err);
        check(status == -1 && access("/dev/full", F_OK) == 0, "write: disk full at flush, device not removed", "status %d: %s", status, err);
        out.shape[0] = 65536;
    }
    signal(SIGXFSZ, SIG_IGN); // a write beyond the limit then fails with EFBIG
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 10000;
    unlink(path);
    fflush(stdout);
    setrlimit(RLIMIT_FSIZE, &small);
    status = st_write(path, &out, 1, NULL, 0, err, sizeof err);
    setrlimit(RLIMIT_FSIZE, &old);
    check(status == -1 && strstr(err, path) && access(path, F_OK) != 0, "write: partial file removed", "status %d: %s", status, err);
    two[0] = two[1] = out;
    check(st_write(path, two, 2, NULL, 0, err, sizeof err) == -1 && strstr(err, "duplicate"), "write: duplicate name refused", "%s", err);
    two[1].name = "v"; two[0].shape[0] = two[1].shape[0] = 1ll << 50; // 2^52 bytes each
    check(st_write(path, two, 2, NULL, 0, err, sizeof err) == -1 && strstr(err, "2^53"), "write: total size overflow refused", "%s", err);
    two[0] = out; two[0].dtype = "F31";
    check(st_write(path, two, 1, NULL, 0, err, sizeof err) == -1 && strstr(err, "F31"), "write: unknown dtype refused", "%s", err);
    two[0] = out; two[0].shape[0] = -1;
    check(st_write(path, two, 1, NULL, 0, err, sizeof err) == -1, "write: negative shape refused", "no failure");
    two[0] = out; two[0].ndim = 9;
    check(st_write(path, two, 1, NULL, 0, err, sizeof err) == -1, "write: nine dimensions refused", "no failure");
    two[0] = out; two[0].data = NULL;
    check(st_write(path, two, 1, NULL, 0, err, sizeof err) == -1, "write: missing data refused", "no failure");
    two[0] = out; two[0].name = "__metadata__";
    check(st_write(path, two, 1, NULL, 0, err, sizeof err) == -1 && access(path, F_OK) != 0, "write: reserved name refused, no file left", "%s", err);
}

int main(int argc, char **argv) {
    struct timespec now;
    uint64_t seed;
    clock_gettime(CLOCK_REALTIME, &now);
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
    printf("seed %llu\n", (unsigned long long)seed);
    rng_state = seed ^ 0x9E3779B97F4A7C15ull;
    if (rng_state == 0) rng_state = 1; // xorshift never leaves 0
    if (mkdtemp(dir) == NULL) { perror(dir); return 2; }
    snprintf(path, sizeof path, "%s/file", dir);
    test_json();
    test_round_trip();
    test_metadata();
    test_bad_files();
    test_damage();
    test_conversions();
    test_oracle_file();
    test_hash();
    test_large_read();
    test_write_errors();
    unlink(path);
    check(rmdir(dir) == 0, "temporary directory removed", "%s: %s", dir, strerror(errno));
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
