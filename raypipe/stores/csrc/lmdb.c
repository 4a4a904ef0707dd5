/* LMDB's file format, read by pread, page by page: the optional extension behind raypipe/stores/lmdb_file.py.
 *
 *     open(file, read_at, num_bytes, page_bytes, root, depth, last_page) -> reader
 *         Of a tree as the file's meta pages have it; of depth 0 if it is empty. `file` is a descriptor, which must
 *         stay open; or -1, and read_at(num, start) -> bytes reads in its place.
 *     get(reader, key) -> bytes or None
 *         The value of a key.
 *     entries(reader, after, most_pages) -> (keys, key_sizes, value_sizes)
 *         The entries of leaf pages, in the order of keys: those of the leaf behind that of the key `after`, or of the
 *         first one (None), and of the next. `keys` has all their bytes; sizes are uint32. Empty: there are no more.
 *     records(reader, keys, num_fixed, wanted) -> (fixed, columns, done)
 *         Records of raypipe's own layout, many in one call. `keys` are int64; `fixed` has num_fixed * 8 bytes of each,
 *         as they are stored; `wanted` has a byte for each variable column, and `columns` a list for each of those that
 *         are not 0, of bytes or None; `done` a byte for each key: 0 where it is missing, or anything is damaged.
 *
 * ValueError: what is damaged. OSError: the file cannot be read. liblmdb maps its file and follows the numbers in it,
 * so damage, or a file that is cut short while it is open, ends the process. Here bytes are untrusted: no number of
 * theirs is used before it has been compared with the sizes of what was read.
 *
 * A page begins with its own number, so one that was written to a wrong place is found. Values have no checksum. Files
 * are those of liblmdb 0.9 (data version 1) from little-endian machines of 64 bits.
 *
 *     branch      ascending keys -> page numbers. The first key is ignored: it counts as below all others
 *     leaf        ascending keys -> values, or lengths and page numbers of values too long for a leaf
 *     overflow    a header, then one such value, over as many pages as it takes
 *
 * Any number of threads may read by one reader, and so may forked children: a call has memory of its own, and what
 * they share is only ever added to.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../kernel/csrc/bounds.h"

/* Version of this interface; raypipe/stores/lmdb_file.py accepts no other. */
#define INTERFACE_VERSION 2

#define PAGE_HEADER 16
#define NUM_METAS 2
#define KEY_BYTES 8
#define MAX_PAGE_BYTES 32768
#define MAX_DEPTH 32
#define MAX_VALUE (1u << 29) /* MAX_SAMPLE_BYTES of raypipe/stores/base.py */
#define MAX_FIXED (MAX_VALUE / 8)
#define NO_VALUE 0xFFFFFFFFu /* a length that says None */
enum { BRANCH_PAGE = 1, LEAF_PAGE = 2, OVERFLOW_PAGE = 4, LONG_VALUE = 1, NAMED_DATABASE = 2 };

/* Branch pages that are kept. A page of 4 KiB has about 200 children, so two levels of six million keys are 200. */
#define NUM_KEPT 1024
#define NUM_PLACES 8 /* of one page among them */

typedef struct {
    int file;
    PyObject *read_at; /* NULL: `file` is read */
    uint64_t num_bytes, page_bytes, root, last_page;
    int depth;
    uint8_t *kept[NUM_KEPT]; /* sound branch pages; one that is there stays until the reader is freed */
} Tree;

/* A call's memory, and why it failed. */
typedef struct {
    Tree *tree;
    uint8_t *leaf, *branch; /* of a page each; a branch that is not kept */
    uint8_t *record;        /* a long value with its header */
    size_t record_bytes;
    int error; /* errno of a read that failed; 0: `damage` says why, or Python has the error */
    char damage[160];
} Call;

__attribute__((format(printf, 2, 3))) static void describe(Call *call, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->damage, sizeof call->damage, format, arguments);
    va_end(arguments);
}

/* 0, and what is damaged. */
#define damaged(call, ...) (describe(call, __VA_ARGS__), 0)

static int failed(Call *call, int error)
{
    call->error = error;
    return 0;
}

/* By Python's function. 0: it raises, or gives too little. */
static int call_read_at(Call *call, uint64_t start, Writer to)
{
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject *bytes = PyObject_CallFunction(call->tree->read_at, "nK", (Py_ssize_t)to.left, (unsigned long long)start);
    char *content;
    Py_ssize_t num = 0;
    int is_read = 0;
    if (bytes && PyBytes_AsStringAndSize(bytes, &content, &num) == 0)
        is_read = (size_t)num == to.left ? put(&to, reader_of(content, (size_t)num))
                                         : damaged(call, "the file has become shorter than %llu bytes",
                                                   (unsigned long long)(start + to.left));
    Py_XDECREF(bytes);
    PyGILState_Release(state);
    return is_read;
}

/* Fills a buffer with bytes of the file, from a place behind the beginning of a page on. */
static int read_at(Call *call, uint64_t number, uint64_t place, Writer to)
{
    const Tree *tree = call->tree;
    const uint64_t start = number * tree->page_bytes + place;
    if (number < NUM_METAS || number > tree->last_page || start > tree->num_bytes || to.left > tree->num_bytes - start)
        return damaged(call, "page %llu, %llu bytes, in a file of %llu", (unsigned long long)number,
                       (unsigned long long)(place + to.left), (unsigned long long)tree->num_bytes);
    if (tree->read_at)
        return call_read_at(call, start, to);
    for (uint64_t at = start; to.left;) {
        Writer passed;
        const ssize_t num = pread(tree->file, to.at, to.left, (off_t)at);
        if (num < 0 && errno == EINTR)
            continue;
        if (num < 0)
            return failed(call, errno);
        if (num == 0)
            return damaged(call, "the file has become shorter than %llu bytes", (unsigned long long)(at + to.left));
        if (!set_aside(&to, (uint64_t)num, &passed))
            return 0;
        at += (uint64_t)num;
    }
    return 1;
}

/* Passes a page's header, as it begins in all kinds. 0: it is not a page of this number and kind. */
static int pass_header(Call *call, Reader *page, uint64_t number, unsigned kind)
{
    uint64_t own_number = 0, pad, flags = 0;
    if (take_little(page, 8, &own_number) && take_little(page, 2, &pad) && take_little(page, 2, &flags) &&
        own_number == number && flags == kind)
        return 1;
    return damaged(call, "page %llu has the number %llu and flags %#llx, but must %s", (unsigned long long)number,
                   (unsigned long long)own_number, (unsigned long long)flags,
                   kind == BRANCH_PAGE ? "have flags 0x1" : kind == LEAF_PAGE ? "have flags 0x2" : "be a long value");
}

/* The page's number of nodes; 0: it is not a sound page of this kind. */
static int num_nodes_of(Call *call, Reader page, uint64_t number, unsigned kind)
{
    const size_t page_bytes = page.left;
    uint64_t lower, upper;
    if (!pass_header(call, &page, number, kind) || !take_little(&page, 2, &lower) || !take_little(&page, 2, &upper))
        return 0;
    if (lower < PAGE_HEADER || lower > upper || upper > page_bytes)
        return damaged(call, "page %llu has its free space from byte %llu to %llu", (unsigned long long)number,
                       (unsigned long long)lower, (unsigned long long)upper);
    if (lower < PAGE_HEADER + 2)
        return damaged(call, "page %llu is empty", (unsigned long long)number);
    return (int)(lower - PAGE_HEADER) / 2;
}

/* A node of a page: 4 bytes and the flags, which are its value's size or its child's number; its key, which may be of
 * any length; and what stands behind that, up to the end of the page. */
typedef struct {
    uint64_t low, flags;
    Reader key, behind;
} Node;

/* 0: it is not within its page. */
static int read_node(Call *call, Reader page, int slot, Node *node)
{
    Reader place, rest = page;
    uint64_t start = 0, key_bytes;
    if (!part_of(&page, PAGE_HEADER + 2 * (uint64_t)slot, 2, &place) || !take_little(&place, 2, &start) ||
        start < PAGE_HEADER || !pass(&rest, start) || !take_little(&rest, 4, &node->low) ||
        !take_little(&rest, 2, &node->flags) || !take_little(&rest, 2, &key_bytes))
        return damaged(call, "a node at byte %llu of a page of %zu", (unsigned long long)start, page.left);
    if (!take(&rest, key_bytes, &node->key))
        return damaged(call, "a key of %llu bytes at byte %zu of a page of %zu", (unsigned long long)key_bytes,
                       page.left - rest.left, page.left);
    node->behind = rest;
    return 1;
}

/* As bytes compare: a key that is the other's beginning comes first. */
static int compare(Reader one, Reader other)
{
    const size_t num = one.left < other.left ? one.left : other.left;
    const int order = num ? memcmp(one.at, other.at, num) : 0;
    return order ? order : (one.left > other.left) - (one.left < other.left);
}

/* 0: it is not a sound branch page, or its keys do not ascend. */
static int is_branch(Call *call, Reader page, uint64_t number)
{
    const int num = num_nodes_of(call, page, number, BRANCH_PAGE);
    Node before, node;
    for (int slot = 0; slot < num; slot++) {
        if (!read_node(call, page, slot, &node))
            return 0;
        if (slot > 1 && compare(before.key, node.key) >= 0) /* the first key says nothing */
            return damaged(call, "the keys of branch page %llu do not ascend", (unsigned long long)number);
        before = node;
    }
    return num > 0;
}

/* A kept page with this number; NULL: it is not kept, and `empty` is a place for it, if there is one. */
static uint8_t *kept_page(Tree *tree, uint64_t number, uint8_t ***empty)
{
    *empty = NULL;
    for (uint64_t i = 0; i < NUM_PLACES; i++) {
        uint8_t **place = &tree->kept[(number + i) % NUM_KEPT], *page = __atomic_load_n(place, __ATOMIC_ACQUIRE);
        Reader header = reader_of(page, page ? 8 : 0);
        uint64_t own_number;
        if (!page) {
            *empty = place;
            return NULL;
        }
        if (take_little(&header, 8, &own_number) && own_number == number)
            return page;
    }
    return NULL;
}

/* A sound branch page, kept or read. */
static int branch_page(Call *call, uint64_t number, Reader *page)
{
    Tree *tree = call->tree;
    uint8_t **empty, *kept = kept_page(tree, number, &empty);
    if (kept) {
        *page = reader_of(kept, tree->page_bytes);
        return 1;
    }
    if (!call->branch && !(call->branch = malloc(tree->page_bytes)))
        return failed(call, ENOMEM);
    *page = reader_of(call->branch, tree->page_bytes);
    if (!read_at(call, number, 0, writer_of(call->branch, tree->page_bytes)) || !is_branch(call, *page, number))
        return 0;
    uint8_t *expected = NULL;
    if (empty && __atomic_compare_exchange_n(empty, &expected, call->branch, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        call->branch = NULL; /* it is the reader's now */
    return 1;
}

/* The node of a branch page whose child has a key: the last one whose key is not above it. */
static int slot_of(Call *call, Reader page, int num, Reader key)
{
    int low = 1, high = num;
    while (low < high) {
        const int middle = (low + high) / 2;
        Node node;
        if (!read_node(call, page, middle, &node))
            return -1;
        if (compare(node.key, key) > 0)
            high = middle;
        else
            low = middle + 1;
    }
    return low - 1;
}

/* The way through the branch pages to a leaf. */
typedef struct {
    uint64_t number;
    int slot, num;
} Step;

/* Goes from a page of some level to a leaf: that of a key, or the first one (NULL). */
static int go_down(Call *call, Step *steps, int level, uint64_t number, const Reader *key, uint64_t *leaf)
{
    for (; level < call->tree->depth - 1; level++) {
        Reader page;
        Node node;
        if (!branch_page(call, number, &page))
            return 0;
        const int num = num_nodes_of(call, page, number, BRANCH_PAGE), slot = key ? slot_of(call, page, num, *key) : 0;
        if (slot < 0 || !read_node(call, page, slot, &node))
            return 0;
        steps[level] = (Step){number, slot, num};
        number = node.low | node.flags << 32;
    }
    *leaf = number;
    return 1;
}

/* Goes on to the next leaf; 0, which no leaf has: there is none. */
static int go_on(Call *call, Step *steps, uint64_t *leaf)
{
    *leaf = 0;
    for (int level = call->tree->depth - 2; level >= 0; level--) {
        Step *step = &steps[level];
        Reader page;
        Node node;
        if (step->slot + 1 == step->num)
            continue;
        if (!branch_page(call, step->number, &page) || !read_node(call, page, ++step->slot, &node))
            return 0;
        return go_down(call, steps, level + 1, node.low | node.flags << 32, NULL, leaf);
    }
    return 1;
}

/* Reads a leaf page, and gives its number of nodes; 0: it is not sound. */
static int read_leaf(Call *call, uint64_t number, Reader *page)
{
    const size_t page_bytes = call->tree->page_bytes;
    if (!call->leaf && !(call->leaf = malloc(page_bytes)))
        return failed(call, ENOMEM);
    *page = reader_of(call->leaf, page_bytes);
    return read_at(call, number, 0, writer_of(call->leaf, page_bytes)) ? num_nodes_of(call, *page, number, LEAF_PAGE)
                                                                       : 0;
}

/* Where a value is: in the leaf, or in pages of its own, from `number` on. */
typedef struct {
    int is_there, is_long;
    Reader inside;
    uint64_t number, num;
} Value;

static int value_of(Call *call, Reader page, Node *node, Value *value)
{
    const size_t start = page.left - node->behind.left;
    *value = (Value){.is_there = 1, .is_long = node->flags == LONG_VALUE, .num = node->low};
    if (node->flags == NAMED_DATABASE)
        return damaged(call, "it has named databases");
    if (node->flags > LONG_VALUE)
        return damaged(call, "its flags are %#llx", (unsigned long long)node->flags);
    if (value->is_long ? take_little(&node->behind, 8, &value->number)
                       : take(&node->behind, value->num, &value->inside))
        return 1;
    return damaged(call, "a value of %llu bytes at byte %zu of a page of %zu", (unsigned long long)value->num, start,
                   page.left);
}

/* Finds the value of a key. */
static int find(Call *call, Reader key, Value *value)
{
    Step steps[MAX_DEPTH];
    uint64_t number;
    Reader page;
    Node node;
    *value = (Value){0};
    if (!call->tree->depth) /* it is empty */
        return 1;
    if (!go_down(call, steps, 0, call->tree->root, &key, &number))
        return 0;
    const int num = read_leaf(call, number, &page);
    if (!num)
        return 0;
    int low = 0, high = num; /* the first whose key is not below */
    while (low < high) {
        const int middle = (low + high) / 2;
        if (!read_node(call, page, middle, &node))
            return 0;
        if (compare(node.key, key) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == num)
        return 1;
    if (!read_node(call, page, low, &node))
        return 0;
    return compare(node.key, key) ? 1 : value_of(call, page, &node, value);
}

/* Whether a long value is sound by its header, of PAGE_HEADER bytes. */
static int is_long_value(Call *call, Reader header, const Value *value)
{
    uint64_t num_pages;
    if (!pass_header(call, &header, value->number, OVERFLOW_PAGE) || !take_little(&header, 4, &num_pages))
        return 0;
    /* It may have more pages than it needs, since replacing a value with a shorter one keeps the pages. */
    if (num_pages * call->tree->page_bytes >= PAGE_HEADER + value->num &&
        num_pages <= call->tree->last_page + 1 - value->number)
        return 1;
    return damaged(call, "a value of %llu bytes in %llu pages from page %llu", (unsigned long long)value->num,
                   (unsigned long long)num_pages, (unsigned long long)value->number);
}

static int is_of_a_size(Call *call, const Value *value)
{
    return value->num <= MAX_VALUE ||
           damaged(call, "a value of %llu bytes; the limit is %u", (unsigned long long)value->num, MAX_VALUE);
}

/* A value, in the leaf, or read into call->record. */
static int load(Call *call, const Value *value, Reader *content)
{
    if (!value->is_long) {
        *content = value->inside;
        return 1;
    }
    if (!is_of_a_size(call, value))
        return 0;
    const size_t num_bytes = PAGE_HEADER + (size_t)value->num;
    if (call->record_bytes < num_bytes) {
        free(call->record);
        call->record_bytes = num_bytes + num_bytes / 4;
        if (!(call->record = malloc(call->record_bytes))) {
            call->record_bytes = 0;
            return failed(call, ENOMEM);
        }
    }
    *content = reader_of(call->record, num_bytes);
    return read_at(call, value->number, 0, writer_of(call->record, num_bytes)) &&
           is_long_value(call, *content, value) && pass(content, PAGE_HEADER);
}

static void end_call(Call *call)
{
    free(call->leaf);
    free(call->branch);
    free(call->record);
}

/* Raises the reason why a call failed. */
static PyObject *raise_reason(const Call *call)
{
    if (PyErr_Occurred()) /* by read_at */
        return NULL;
    if (call->error == ENOMEM)
        return PyErr_NoMemory();
    if (call->error) {
        errno = call->error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyErr_SetString(PyExc_ValueError, call->damage);
    return NULL;
}

static const char CAPSULE[] = "raypipe.lmdb";

static Tree *tree_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, CAPSULE); }

static void free_tree(Tree *tree)
{
    for (int i = 0; i < NUM_KEPT; i++)
        free(tree->kept[i]);
    Py_XDECREF(tree->read_at);
    free(tree);
}

static void free_capsule(PyObject *capsule)
{
    Tree *tree = tree_of(capsule);
    if (tree)
        free_tree(tree);
}

static PyObject *py_open(PyObject *self, PyObject *args)
{
    (void)self;
    int file, depth;
    PyObject *read_at;
    unsigned long long num_bytes, page_bytes, root, last_page;
    if (!PyArg_ParseTuple(args, "iOKKKiK", &file, &read_at, &num_bytes, &page_bytes, &root, &depth, &last_page))
        return NULL;
    if (page_bytes < 512 || page_bytes > MAX_PAGE_BYTES || depth < 0 || depth > MAX_DEPTH ||
        last_page > UINT64_MAX / MAX_PAGE_BYTES - MAX_VALUE || num_bytes > INT64_MAX)
        return PyErr_Format(PyExc_ValueError, "its last page is %llu, in a file of %llu bytes", last_page, num_bytes);
    Tree *tree = calloc(1, sizeof *tree);
    if (!tree)
        return PyErr_NoMemory();
    tree->file = file;
    tree->read_at = read_at == Py_None ? NULL : Py_NewRef(read_at);
    tree->num_bytes = num_bytes;
    tree->page_bytes = page_bytes;
    tree->root = root;
    tree->depth = depth;
    tree->last_page = last_page;
    PyObject *capsule = PyCapsule_New(tree, CAPSULE, free_capsule);
    if (!capsule)
        free_tree(tree);
    return capsule;
}

static PyObject *py_get(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule, *result = NULL;
    Py_buffer key;
    if (!PyArg_ParseTuple(args, "Oy*", &capsule, &key))
        return NULL;
    Call call = {.tree = tree_of(capsule)};
    Value value;
    int is_found = 0;
    if (!call.tree)
        goto end;
    Py_BEGIN_ALLOW_THREADS
    is_found = find(&call, reader_of(key.buf, (size_t)key.len), &value) &&
               (!value.is_long || is_of_a_size(&call, &value));
    Py_END_ALLOW_THREADS
    if (!is_found) {
        raise_reason(&call);
    } else if (!value.is_there) {
        result = Py_NewRef(Py_None);
    } else if (!value.is_long) {
        result = PyBytes_FromStringAndSize((const char *)value.inside.at, (Py_ssize_t)value.inside.left);
    } else {
        uint8_t header[PAGE_HEADER];
        const Reader read_header = reader_of(header, PAGE_HEADER);
        int is_read;
        /* Before memory is taken for the value: is there a page of that kind at all? */
        Py_BEGIN_ALLOW_THREADS
        is_read = read_at(&call, value.number, 0, writer_of(header, PAGE_HEADER)) &&
                  is_long_value(&call, read_header, &value);
        Py_END_ALLOW_THREADS
        if (is_read && !(result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)value.num)))
            goto end;
        if (is_read) {
            const Writer to = writer_of(PyBytes_AsString(result), (size_t)value.num);
            Py_BEGIN_ALLOW_THREADS
            is_read = read_at(&call, value.number, PAGE_HEADER, to);
            Py_END_ALLOW_THREADS
        }
        if (!is_read) {
            Py_CLEAR(result);
            raise_reason(&call);
        }
    }
end:
    end_call(&call);
    PyBuffer_Release(&key);
    return result;
}

/* Bytes that grow. */
typedef struct {
    uint8_t *at;
    size_t num, room;
} Growing;

static int append(Growing *to, Reader bytes)
{
    if (to->room - to->num <= bytes.left) { /* also before the first bytes, be they none: there is a place then */
        const size_t room = 2 * (to->num + bytes.left) + 65536;
        uint8_t *at = realloc(to->at, room);
        if (!at)
            return 0;
        to->at = at;
        to->room = room;
    }
    Writer writer = writer_of(to->at + to->num, to->room - to->num);
    to->num += bytes.left;
    return put(&writer, bytes);
}

static int append_number(Growing *to, uint64_t number)
{
    const uint32_t value = (uint32_t)number;
    return append(to, reader_of(&value, sizeof value));
}

static PyObject *bytes_of(const Growing *from)
{
    return PyBytes_FromStringAndSize((const char *)from->at, (Py_ssize_t)from->num);
}

typedef struct {
    Growing keys, key_sizes, value_sizes;
    size_t last; /* where the last key begins */
} Entries;

/* Adds the entries of a leaf page, each with its place checked. `before`: a key below all of them, maybe the last one
 * in `entries`; NULL: there is none. */
static int add_leaf(Call *call, uint64_t number, const Reader *before, Entries *entries)
{
    const Tree *tree = call->tree;
    Reader page;
    const int num = read_leaf(call, number, &page);
    for (int slot = 0; slot < num; slot++) {
        Node node;
        Value value;
        if (!read_node(call, page, slot, &node))
            return 0;
        if (slot == 0 && before && compare(node.key, *before) <= 0) /* also ends a walk that comes to a page twice */
            return damaged(call, "the keys of page %llu are not above those before", (unsigned long long)number);
        if (!value_of(call, page, &node, &value))
            return 0;
        if (value.is_long && (value.number < NUM_METAS || value.number > tree->last_page ||
                              value.number * tree->page_bytes + PAGE_HEADER + value.num > tree->num_bytes))
            return damaged(call, "page %llu has a value of %llu bytes from page %llu on, in a file of %llu bytes",
                           (unsigned long long)number, (unsigned long long)value.num, (unsigned long long)value.number,
                           (unsigned long long)tree->num_bytes);
        entries->last = entries->keys.num;
        if (!append(&entries->keys, node.key) || !append_number(&entries->key_sizes, node.key.left) ||
            !append_number(&entries->value_sizes, value.num))
            return failed(call, ENOMEM);
    }
    return num > 0;
}

static int add_leaves(Call *call, const Reader *after, int most_pages, Entries *entries)
{
    Step steps[MAX_DEPTH];
    Reader last;
    const Reader *before = after;
    uint64_t number;
    if (!call->tree->depth)
        return 1;
    if (!go_down(call, steps, 0, call->tree->root, after, &number) || (after && !go_on(call, steps, &number)))
        return 0;
    for (int page = 0; number && page < most_pages; page++) {
        if (!add_leaf(call, number, before, entries) || !go_on(call, steps, &number))
            return 0;
        last = reader_of(entries->keys.at + entries->last, entries->keys.num - entries->last);
        before = &last;
    }
    return 1;
}

static PyObject *py_entries(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule, *result = NULL;
    Py_buffer after;
    int most_pages;
    if (!PyArg_ParseTuple(args, "Oz*i", &capsule, &after, &most_pages))
        return NULL;
    Call call = {.tree = tree_of(capsule)};
    Entries entries = {0};
    const Reader key = reader_of(after.buf, (size_t)after.len);
    if (call.tree) {
        int is_read;
        Py_BEGIN_ALLOW_THREADS
        is_read = add_leaves(&call, after.buf ? &key : NULL, most_pages, &entries);
        Py_END_ALLOW_THREADS
        result = is_read ? Py_BuildValue("NNN", bytes_of(&entries.keys), bytes_of(&entries.key_sizes),
                                         bytes_of(&entries.value_sizes))
                         : raise_reason(&call);
    }
    free(entries.keys.at);
    free(entries.key_sizes.at);
    free(entries.value_sizes.at);
    end_call(&call);
    PyBuffer_Release(&after);
    return result;
}

/* Puts the wanted columns of a record into row `row`; 0: it is damaged, -1: a Python error. */
static int unpack_record(Reader record, Reader wanted, Writer *fixed, PyObject *columns, Py_ssize_t row)
{
    Reader numbers;
    if (!take(&record, fixed->left, &numbers) || !put(fixed, numbers))
        return 0;
    const Py_ssize_t num_columns = PyList_Size(columns);
    for (Py_ssize_t column = 0; column < num_columns; pass(&wanted, 1)) {
        uint64_t length;
        Reader content = {0};
        if (!take_little(&record, 4, &length) || (length != NO_VALUE && !take(&record, length, &content)))
            return 0;
        if (!byte_at(&wanted, 0))
            continue;
        PyObject *value = length == NO_VALUE
                              ? Py_NewRef(Py_None)
                              : PyBytes_FromStringAndSize((const char *)content.at, (Py_ssize_t)content.left);
        if (!value || PyList_SetItem(PyList_GetItem(columns, column), row, value) < 0)
            return -1;
        column++;
    }
    return 1;
}

/* A list of None for each column that is wanted; NULL: a Python error. */
static PyObject *new_columns(Reader wanted, Py_ssize_t num)
{
    PyObject *columns = PyList_New(0);
    for (; columns && wanted.left; pass(&wanted, 1)) {
        if (!byte_at(&wanted, 0))
            continue;
        PyObject *column = PyList_New(num);
        for (Py_ssize_t row = 0; column && row < num; row++)
            PyList_SetItem(column, row, Py_NewRef(Py_None));
        if (!column || PyList_Append(columns, column) < 0)
            Py_CLEAR(columns);
        Py_XDECREF(column);
    }
    return columns;
}

static PyObject *zeros(Py_ssize_t num)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, num);
    Writer to = writer_of(bytes ? PyBytes_AsString(bytes) : NULL, bytes ? (size_t)num : 0);
    put_zeros(&to, to.left);
    return bytes;
}

/* Finds the record of an index. 0: there is none to be had. */
static int find_record(Call *call, uint64_t index, Reader *record)
{
    uint8_t key[KEY_BYTES];
    Writer to = writer_of(key, sizeof key);
    Value value;
    return index <= INT64_MAX && put_big(&to, KEY_BYTES, index) && find(call, reader_of(key, sizeof key), &value) &&
           value.is_there && load(call, &value, record);
}

static PyObject *py_records(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *capsule;
    Py_buffer keys, wanted;
    int num_fixed;
    if (!PyArg_ParseTuple(args, "Oy*iy*", &capsule, &keys, &num_fixed, &wanted))
        return NULL;
    const Py_ssize_t num = keys.len / 8;
    const Reader columns_wanted = reader_of(wanted.buf, (size_t)wanted.len);
    Reader rest = reader_of(keys.buf, (size_t)keys.len);
    Call call = {.tree = tree_of(capsule)};
    PyObject *fixed = NULL, *columns = NULL, *done = NULL, *result = NULL;
    if (!call.tree)
        goto end;
    if (num_fixed < 0 || num_fixed > (int)MAX_FIXED || (num_fixed && num > PY_SSIZE_T_MAX / 8 / num_fixed)) {
        PyErr_SetString(PyExc_ValueError, "no such layout of records");
        goto end;
    }
    fixed = zeros(num * num_fixed * 8);
    done = zeros(num);
    columns = fixed && done ? new_columns(columns_wanted, num) : NULL;
    if (!columns)
        goto end;
    Writer all_fixed = writer_of(PyBytes_AsString(fixed), (size_t)(num * num_fixed * 8)), row_fixed;
    Writer all_done = writer_of(PyBytes_AsString(done), (size_t)num);
    for (Py_ssize_t row = 0; row < num; row++) {
        uint64_t index = 0;
        Reader key, record;
        int is_done = take(&rest, 8, &key) && set_aside(&all_fixed, (uint64_t)num_fixed * 8, &row_fixed);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        is_done = is_done && take_little(&key, 8, &index);
#else
        is_done = is_done && take_big(&key, 8, &index);
#endif
        Py_BEGIN_ALLOW_THREADS
        is_done = is_done && find_record(&call, index, &record);
        Py_END_ALLOW_THREADS
        if (PyErr_Occurred()) /* by read_at */
            goto end;
        if (is_done)
            is_done = unpack_record(record, columns_wanted, &row_fixed, columns, row);
        if (is_done < 0 || !put_big(&all_done, 1, (uint64_t)is_done))
            goto end;
    }
    result = PyTuple_Pack(3, fixed, columns, done);
end:
    end_call(&call);
    Py_XDECREF(fixed);
    Py_XDECREF(columns);
    Py_XDECREF(done);
    PyBuffer_Release(&wanted);
    PyBuffer_Release(&keys);
    return result;
}

static PyMethodDef methods[] = {
    {"open", py_open, METH_VARARGS, "A reader of an open file; see lmdb.c"},
    {"get", py_get, METH_VARARGS, "The value of a key; see lmdb.c"},
    {"entries", py_entries, METH_VARARGS, "Keys and sizes of the next entries; see lmdb.c"},
    {"records", py_records, METH_VARARGS, "Columns of many records; see lmdb.c"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_raypipe_lmdb", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__raypipe_lmdb(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "INTERFACE_VERSION", INTERFACE_VERSION) < 0)
        Py_CLEAR(made);
    return made;
}
